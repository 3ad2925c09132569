//! An S3 server in this process: s3s over a directory.

use std::net::SocketAddr;

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s_fs::FileSystem;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use super::{ACCESS_KEY, SECRET_KEY};

/// The server; it ends when this is dropped.
pub struct S3sServer {
    address: SocketAddr,
    runtime: Option<Runtime>,
    _root: TempDir,
}

impl S3sServer {
    /// Starts it on a free port, with a bucket named `bucket`.
    pub fn start() -> Self {
        let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        std::fs::create_dir(root.path().join("bucket")).unwrap();
        let mut builder = S3ServiceBuilder::new(FileSystem::new(root.path()).unwrap());
        builder.set_auth(SimpleAuth::from_single(ACCESS_KEY, SECRET_KEY));
        let service = builder.build();
        let runtime = Runtime::new().unwrap();
        let listener = runtime
            .block_on(TcpListener::bind(("127.0.0.1", 0)))
            .unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let service = service.clone();
                tokio::spawn(async move {
                    let connections = Builder::new(TokioExecutor::new());
                    // A client that goes away is none of the server's trouble.
                    let _ = connections
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Self {
            address,
            runtime: Some(runtime),
            _root: root,
        }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Drop for S3sServer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
