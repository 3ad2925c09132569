//! Servers that others wrote, each a process of its own that ends with the value that stands for it.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvstrata_testkit::payload::next;
use tempfile::TempDir;

use super::PATIENCE;

/// `SeaweedFS` opens a second port that much above each that it is given.
const SECOND_PORT: u16 = 10_000;
/// So that the second ones, too, are below those that the system gives to clients.
const PORT_FIRST: u16 = 20_000;
const PORTS: u64 = 2700;
/// Numbers that were tried as ports in this process.
static TRIED: AtomicU64 = AtomicU64::new(0);

const SEAWEEDFS_OPTIONS: [&str; 10] = [
    "-dir=.",
    "-ip=127.0.0.1",
    "-ip.bind=127.0.0.1",
    "-master.volumeSizeLimitMB=64",
    "-volume.max=50",
    // It would listen on fixed ports, too, and tell its makers of itself.
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
    "-master.telemetry=false",
    // In its working directory.
    "-filer.localSocket=filer.sock",
    "-s3.localSocket=s3.sock",
];

/// How a server is run.
struct Plan {
    program: &'static str,
    arguments: Vec<String>,
    port: u16,
    sockets: Vec<PathBuf>,
}

/// A server with an empty bucket named `bucket`.
pub struct Server {
    process: Child,
    port: u16,
    folder: TempDir,
    /// What it leaves behind when it is killed.
    sockets: Vec<PathBuf>,
}

impl Server {
    /// moto's.
    pub fn moto() -> Self {
        Self::started(|| {
            let [port] = free_ports();
            let script = programs().join("moto_server").display().to_string();
            let arguments = ["-H", "127.0.0.1", "-p", &port.to_string()].map(str::to_owned);
            Plan {
                program: "python",
                arguments: [script].into_iter().chain(arguments).collect(),
                port,
                sockets: Vec::new(),
            }
        })
    }

    /// `SeaweedFS`.
    pub fn seaweedfs() -> Self {
        Self::started(|| {
            let ports: [u16; 4] = free_ports();
            let of_kind = ["master", "volume", "filer", "s3"].into_iter().zip(ports);
            let mut arguments = vec!["server".to_owned(), "-s3".to_owned()];
            arguments.extend(SEAWEEDFS_OPTIONS.map(str::to_owned));
            let ports_of_kind = of_kind.clone();
            arguments.extend(ports_of_kind.map(|(kind, port)| format!("-{kind}.port={port}")));
            let sockets = of_kind.map(|(kind, port)| {
                let second = port + SECOND_PORT;
                PathBuf::from(format!("/tmp/seaweedfs-{kind}-grpc-{second}.sock"))
            });
            Plan {
                program: "weed",
                arguments,
                port: ports[3],
                sockets: sockets.collect(),
            }
        })
    }

    /// Starts a server and waits until it takes requests; again with other ports where it ends.
    fn started(plan: impl Fn() -> Plan) -> Self {
        let mut said = String::new();
        for _ in 0..3 {
            let mut server = Self::start(plan());
            match server.make_bucket() {
                Ok(()) => return server,
                Err(why) => said = why,
            }
        }
        panic!("{said}");
    }

    fn start(plan: Plan) -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let program = programs().join(plan.program);
        assert!(
            program.exists(),
            "{} is missing: scripts/env.sh servers installs it",
            program.display()
        );
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        // The kernel ends it when the thread of this test has ended, however that was.
        let process = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(program)
            .args(plan.arguments)
            .current_dir(folder.path())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", folder.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        Self {
            process,
            port: plan.port,
            folder,
            sockets: plan.sockets,
        }
    }

    /// `http://host:port`.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Makes the bucket, as soon as the server takes requests.
    fn make_bucket(&mut self) -> Result<(), String> {
        let until = Instant::now() + PATIENCE;
        loop {
            let answer = put_bucket(self.port).unwrap_or_else(|error| error.to_string());
            if answer.starts_with("HTTP/1.1 200") {
                return Ok(());
            }
            let ended = self.process.try_wait().unwrap();
            if ended.is_some() || Instant::now() > until {
                let log = std::fs::read_to_string(self.folder.path().join("log"));
                return Err(format!("{answer}, {ended:?}: {}", log.unwrap()));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // SeaweedFS ignores what is politer.
        let _ = self.process.kill();
        let _ = self.process.wait();
        for socket in &self.sockets {
            let _ = std::fs::remove_file(socket);
        }
    }
}

fn put_bucket(port: u16) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let head = "PUT /bucket HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\
                Connection: close\r\n\r\n";
    stream.write_all(head.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Where `scripts/env.sh servers` has put the programs.
fn programs() -> PathBuf {
    match std::env::var_os("KVSTRATA_TEST_SERVERS") {
        Some(folder) => PathBuf::from(folder),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/servers/bin"),
    }
}

/// Ports that are free now, they and the second ports that go with them.
fn free_ports<const COUNT: usize>() -> [u16; COUNT] {
    let free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    let own = u64::from(std::process::id()) << 32;
    core::array::from_fn(|_| {
        loop {
            let mut number = own + TRIED.fetch_add(1, Ordering::Relaxed);
            let port = PORT_FIRST + u16::try_from(next(&mut number) % PORTS).unwrap();
            if free(port) && free(port + SECOND_PORT) {
                return port;
            }
        }
    })
}
