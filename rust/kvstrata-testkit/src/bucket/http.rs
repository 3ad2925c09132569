//! As much of HTTP/1.1 as the client speaks.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read};
use std::net::TcpStream;

/// Longest line of a head.
const LINE_MAX: u64 = 64 << 10;

/// The head of a request.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub(super) method: String,
    /// Decoded, without the query.
    pub(super) path: String,
    pub(super) query: HashMap<String, String>,
    /// Names in lower case.
    pub(super) headers: HashMap<String, String>,
}

impl Head {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    pub(super) fn asked(&self, name: &str) -> &str {
        self.query.get(name).map_or("", String::as_str)
    }

    pub(super) fn length(&self) -> usize {
        let length = self.header("content-length");
        length.and_then(|text| text.parse().ok()).unwrap_or(0)
    }
}

/// Reads the next head; `None` at the end of the connection.
pub(super) fn read_head(reader: &mut BufReader<TcpStream>) -> io::Result<Option<Head>> {
    let line = read_line(reader)?;
    let mut words = line.split(' ');
    let (Some(method), Some(target)) = (words.next(), words.next()) else {
        return Ok(None);
    };
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut head = Head {
        method: method.to_owned(),
        path: decoded(path),
        query: HashMap::new(),
        headers: HashMap::new(),
    };
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        head.query.insert(decoded(name), decoded(value));
    }
    loop {
        let line = read_line(reader)?;
        let Some((name, value)) = line.split_once(':') else {
            return Ok(Some(head));
        };
        let name = name.trim().to_ascii_lowercase();
        head.headers.insert(name, value.trim().to_owned());
    }
}

fn read_line(reader: &mut BufReader<TcpStream>) -> io::Result<String> {
    let mut line = String::new();
    reader.by_ref().take(LINE_MAX).read_line(&mut line)?;
    Ok(line.trim_end().to_owned())
}

/// `%41` as `A`.
fn decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let digits = text.get(at + 1..at + 3);
        let value = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        if let Some(value) = value.filter(|_| *byte == b'%') {
            plain.push(value);
            at += 3;
        } else {
            plain.push(if *byte == b'+' { b' ' } else { *byte });
            at += 1;
        }
    }
    String::from_utf8_lossy(&plain).into_owned()
}
