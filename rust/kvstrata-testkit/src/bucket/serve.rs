//! One connection: requests are read, met with faults, answered.

use std::fmt::Write as _;
use std::io::{self, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use crc_fast::{CrcAlgorithm, Digest};

use super::fault::choose;
use super::http::{Head, read_head};
use super::objects::{Answer, answer, list};
use super::{BucketFault, Method, Shared, Style, locked};

/// Objects up to this size, which are no rows, are always kept.
const SMALL_BYTES: usize = 16 << 10;
/// More bytes than anybody has room for.
const ENDLESS: u64 = 1 << 60;
/// Pieces of 16 KiB that come of them.
const SOME_PIECES: usize = 16;
/// Name of the bucket.
const NAME: &str = "bucket";

/// Serves a connection until it ends.
pub(super) fn serve(stream: &TcpStream, shared: &Shared) {
    let _ = stream.set_nodelay(true);
    let Ok(own) = stream.try_clone() else { return };
    let mut reader = BufReader::new(own);
    while let Ok(Some(head)) = read_head(&mut reader) {
        if !matches!(one(&mut reader, stream, &head, shared), Ok(true)) {
            return;
        }
    }
}

fn method_of(head: &Head, name: &str) -> Method {
    match head.method.as_str() {
        "PUT" => Method::Put,
        "DELETE" => Method::Delete,
        "HEAD" => Method::Head,
        _ if name.is_empty() => Method::List,
        _ => Method::Get,
    }
}

/// Has the peer see a reset: what was sent to us is left unread, and nothing lingers.
fn reset(stream: &TcpStream) {
    let _ = rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO));
    let _ = stream.shutdown(Shutdown::Both);
}

/// Whether faults are over, or the server ends.
fn is_healed(shared: &Shared) -> bool {
    locked(&shared.rules).is_empty() || shared.stop.load(Ordering::Acquire)
}

/// Keeps a connection open, unused, until the server ends or heals.
fn hang(stream: &TcpStream, shared: &Shared) {
    if let Ok(own) = stream.try_clone() {
        locked(&shared.hanging).push(own);
    }
    // Reading would take what the peer sends: only its end is waited for.
    let _ = stream.set_read_timeout(Some(Duration::from_millis(20)));
    let mut buffer = [0; 1];
    while !matches!(stream.peek(&mut buffer), Ok(0)) {
        if is_healed(shared) {
            break;
        }
        #[expect(clippy::disallowed_methods, reason = "a test double")]
        thread::sleep(Duration::from_millis(5));
    }
    let _ = stream.shutdown(Shutdown::Both);
}

/// The path below the bucket, whose name stands in the path or before the host's; `None` where this
/// server does not look for it.
fn path_in_bucket<'head>(head: &'head Head, only: Option<&Style>) -> Option<&'head str> {
    let host = head.header("host").unwrap_or("");
    let in_host = host.strip_prefix(NAME).is_some_and(|h| h.starts_with('.'));
    if in_host {
        return (only != Some(&Style::Path)).then_some(head.path.as_str());
    }
    let path = head.path.strip_prefix('/')?.strip_prefix(NAME)?;
    (only != Some(&Style::Virtual)).then_some(path)
}

/// Whether a body has the checksum that came with it, where one came.
fn is_whole(head: &Head, body: &[u8], shared: &Shared) -> bool {
    let Some(sent) = head.header("x-amz-checksum-crc64nvme") else {
        return true;
    };
    if shared.trusting.load(Ordering::Acquire) {
        return true;
    }
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    digest.update(body);
    let right = sent == BASE64_STANDARD.encode(digest.finalize().to_be_bytes());
    shared
        .checked
        .fetch_add(usize::from(right), Ordering::Relaxed);
    right
}

/// Takes a request's body.
fn take(
    reader: &mut BufReader<TcpStream>,
    body: &mut [u8],
    sips: Option<(usize, Duration)>,
) -> io::Result<()> {
    let Some((bytes, pause)) = sips else {
        return reader.read_exact(body);
    };
    for sip in body.chunks_mut(bytes.max(1)) {
        reader.read_exact(sip)?;
        #[expect(clippy::disallowed_methods, reason = "a test double")]
        thread::sleep(pause);
    }
    Ok(())
}

/// Does what a request asks for an object.
fn carry_out(head: &Head, name: &str, method: Method, body: Vec<u8>, shared: &Shared) -> Answer {
    let version = shared.versions.fetch_add(1, Ordering::Relaxed);
    let mut head = head.clone();
    if shared.unconditional.load(Ordering::Acquire) {
        head.headers.retain(|name, _| !name.starts_with("if-"));
    }
    if shared.whole.load(Ordering::Acquire) {
        head.headers.remove("range");
    }
    let bytes = body.len();
    let mut objects = locked(&shared.objects);
    if method == Method::Put
        && bytes > SMALL_BYTES
        && let Some(newest) = &mut *locked(&shared.newest)
    {
        for gone in newest.note(name, bytes) {
            objects.remove(&gone);
        }
    }
    answer(&mut objects, &head, name, body, version)
}

/// Serves one request; false when the connection is not to be used again.
fn one(
    reader: &mut BufReader<TcpStream>,
    mut stream: &TcpStream,
    head: &Head,
    shared: &Shared,
) -> io::Result<bool> {
    let Some(rest) = path_in_bucket(head, locked(&shared.only_style).as_ref()) else {
        stream.write_all(&bytes_of(&Answer::status(404, "NoSuchBucket"), true))?;
        return Ok(false);
    };
    let name = rest.trim_start_matches('/').to_owned();
    let method = method_of(head, &name);
    let listed = head.asked("prefix").to_owned();
    let known = if name.is_empty() { &listed } else { &name };
    locked(&shared.seen).push((method, known.clone()));
    let met = choose(&mut locked(&shared.rules), method, known);
    let (fault, sips) = (met.map(|met| met.fault), met.and_then(|met| met.sips));
    let mut body = vec![0; head.length()];
    match fault {
        Some(BucketFault::Latency(time)) => {
            #[expect(clippy::disallowed_methods, reason = "a test double")]
            thread::sleep(time);
        }
        Some(BucketFault::Hold) => {
            while !is_healed(shared) {
                #[expect(clippy::disallowed_methods, reason = "a test double")]
                thread::sleep(Duration::from_millis(5));
            }
        }
        Some(BucketFault::Reset) => {
            reset(stream);
            return Ok(false);
        }
        Some(BucketFault::EarlyStatus(status)) => {
            stream.write_all(&bytes_of(&Answer::status(status, "Early"), true))?;
            if sips.is_some() {
                take(reader, &mut body, sips)?;
            }
            hang(stream, shared);
            return Ok(false);
        }
        _ => {}
    }
    if fault == Some(BucketFault::ResetHalfway) && method == Method::Put {
        let half = body.len() / 2;
        take(reader, body.get_mut(..half).unwrap_or(&mut []), sips)?;
        reset(stream);
        return Ok(false);
    }
    take(reader, &mut body, sips)?;
    let answer = match fault {
        _ if !is_whole(head, &body, shared) => Answer::status(400, "BadDigest"),
        Some(BucketFault::Status(status)) => Answer::status(status, "Faulty"),
        Some(BucketFault::Refuse(status, code)) => Answer::status(status, code),
        _ if method == Method::List => list(shared, head),
        _ => carry_out(head, &name, method, body, shared),
    };
    send(stream, shared, answer, method, fault)
}

fn send(
    mut stream: &TcpStream,
    shared: &Shared,
    mut answer: Answer,
    method: Method,
    fault: Option<BucketFault>,
) -> io::Result<bool> {
    match fault {
        Some(BucketFault::NeverAnswer) => {
            hang(stream, shared);
            return Ok(false);
        }
        Some(BucketFault::LoseAnswer) => {
            reset(stream);
            return Ok(false);
        }
        Some(BucketFault::Endless(status)) => {
            let head = format!("HTTP/1.1 {status} Status\r\nContent-Length: {ENDLESS}\r\n\r\n");
            stream.write_all(head.as_bytes())?;
            if method != Method::Head {
                for _ in 0..SOME_PIECES {
                    stream.write_all(&[b'x'; SMALL_BYTES])?;
                }
            }
            stream.shutdown(Shutdown::Both)?;
            return Ok(false);
        }
        Some(BucketFault::Short) => answer.body.truncate(answer.body.len() / 2),
        Some(BucketFault::WrongBody) => {
            let middle = answer.body.len() / 2;
            if let Some(byte) = answer.body.get_mut(middle) {
                *byte ^= 0x40;
            }
        }
        _ => {}
    }
    let head_bytes = bytes_of(&answer, false);
    let body: &[u8] = if method == Method::Head {
        &[]
    } else {
        &answer.body
    };
    stream.write_all(&head_bytes)?;
    let half = body.get(..body.len() / 2).unwrap_or(&[]);
    match fault {
        Some(BucketFault::Truncate) => {
            stream.write_all(half)?;
            stream.shutdown(Shutdown::Both)?;
            return Ok(false);
        }
        Some(BucketFault::ResetHalfway) => {
            stream.write_all(half)?;
            reset(stream);
            return Ok(false);
        }
        Some(BucketFault::Trickle(bytes, pause)) => {
            for piece in body.chunks(bytes.max(1)) {
                stream.write_all(piece)?;
                #[expect(clippy::disallowed_methods, reason = "a test double")]
                thread::sleep(pause);
            }
        }
        _ => stream.write_all(body)?,
    }
    if fault == Some(BucketFault::SlowClose) {
        hang(stream, shared);
        return Ok(false);
    }
    Ok(true)
}

/// The head of an answer, and its body where that is asked for.
fn bytes_of(answer: &Answer, with_body: bool) -> Vec<u8> {
    let mut text = format!(
        "HTTP/1.1 {} Status\r\nContent-Length: {}\r\n",
        answer.status,
        answer.body.len()
    );
    for (name, value) in &answer.headers {
        let _ = write!(text, "{name}: {value}\r\n");
    }
    text.push_str("\r\n");
    let mut bytes = text.into_bytes();
    if with_body {
        bytes.extend_from_slice(&answer.body);
    }
    bytes
}
