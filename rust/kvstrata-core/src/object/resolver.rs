//! Names of hosts: those below `localhost` are this machine (RFC 6761, section 6.3), whatever the
//! system's resolver knows; so a server on this machine can be addressed by its buckets' names.

use core::error::Error;
use core::fmt;
use core::future::Future;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::pin::Pin;
use core::task::{Context, Poll};
use std::io;

use hyper_util::client::legacy::connect::dns::Name;
use tower_service::Service;

/// A host's name that nobody knows.
#[derive(Debug)]
pub(super) struct Unresolved(io::Error);

impl fmt::Display for Unresolved {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "the host's name cannot be resolved: {}", self.0)
    }
}

impl Error for Unresolved {}

/// Asks the system for all other names.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resolver;

impl Service<Name> for Resolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = Unresolved;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Unresolved>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Unresolved>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        Box::pin(async move {
            let addresses: Vec<SocketAddr> = if is_below_localhost(name.as_str()) {
                let both = [
                    IpAddr::V4(Ipv4Addr::LOCALHOST),
                    IpAddr::V6(Ipv6Addr::LOCALHOST),
                ];
                both.into_iter().map(|ip| SocketAddr::new(ip, 0)).collect()
            } else {
                // The port is the client's to fill in.
                let found = tokio::net::lookup_host((name.as_str(), 0)).await;
                found.map_err(Unresolved)?.collect()
            };
            Ok(addresses.into_iter())
        })
    }
}

fn is_below_localhost(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    let last = name.rsplit_once('.').map(|(_, last)| last);
    last.is_some_and(|last| last.eq_ignore_ascii_case("localhost"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_below_localhost_are_this_machine() {
        for name in ["bucket.localhost", "a.b.LOCALHOST", "bucket.localhost."] {
            assert!(is_below_localhost(name), "{name}");
        }
        for name in [
            "localhost",
            "localhost.example",
            "notlocalhost",
            "a.notlocalhost",
        ] {
            assert!(!is_below_localhost(name), "{name}");
        }
    }
}
