//! A relay before a bucket, which answers as servers and proxies may, too.

use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// What becomes of the answers to requests for rows.
#[derive(Clone, Debug)]
pub enum Twist {
    /// They are handed on.
    Nothing,
    /// They are redirects to this place.
    Redirect(u16, String),
    /// Interim answers go before them.
    Interim,
    /// Their bodies come in chunks, without a length.
    Chunked,
    /// They have so many bytes of further headers.
    Headers(usize),
    /// They say that their bodies are encoded, which are handed on as they are.
    Encoded,
}

struct Shared {
    bucket: SocketAddr,
    twist: Mutex<Twist>,
    /// Both ends of every connection so far.
    streams: Mutex<Vec<TcpStream>>,
}

/// The relay; it runs until the process ends.
pub struct Relay {
    shared: Arc<Shared>,
    address: SocketAddr,
}

impl Relay {
    /// One that listens there and asks the server at this endpoint.
    pub fn start(listener: TcpListener, endpoint: &str) -> Self {
        let bucket = endpoint.strip_prefix("http://").unwrap().parse().unwrap();
        let shared = Arc::new(Shared {
            bucket,
            twist: Mutex::new(Twist::Nothing),
            streams: Mutex::default(),
        });
        let address = listener.local_addr().unwrap();
        let own = Arc::clone(&shared);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (own, stream) = (Arc::clone(&own), stream.unwrap());
                thread::spawn(move || {
                    // It ends where either end does.
                    let _ = own.serve(&stream);
                    let _ = stream.shutdown(Shutdown::Both);
                });
            }
        });
        Self { shared, address }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn port(&self) -> u16 {
        self.address.port()
    }

    pub fn twist(&self, twist: Twist) {
        *self.shared.twist.lock().unwrap() = twist;
    }

    /// Closes all connections, as a server does that is started again. Says how many there were.
    pub fn restart(&self) -> usize {
        let streams = core::mem::take(&mut *self.shared.streams.lock().unwrap());
        for stream in &streams {
            // It may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        streams.len()
    }
}

/// A head and its body.
struct Message {
    head: String,
    body: Vec<u8>,
}

impl Message {
    /// Reads one; `None` at the end.
    fn read(from: &mut impl BufRead, has_body: bool) -> std::io::Result<Option<Self>> {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if from.read_line(&mut head)? == 0 {
                return Ok(None);
            }
        }
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            let is_length = name.eq_ignore_ascii_case("content-length");
            is_length.then(|| value.trim().parse().unwrap())
        });
        let mut body = vec![0; length.filter(|_| has_body).unwrap_or(0)];
        from.read_exact(&mut body)?;
        Ok(Some(Self { head, body }))
    }

    fn write(&self, to: &mut impl Write) -> std::io::Result<()> {
        to.write_all(self.head.as_bytes())?;
        to.write_all(&self.body)
    }

    /// Adds lines to the head.
    fn add(&mut self, lines: &str) {
        self.head.truncate(self.head.len() - 2);
        self.head.push_str(lines);
        self.head.push_str("\r\n");
    }
}

impl Shared {
    fn serve(&self, client: &TcpStream) -> std::io::Result<()> {
        let server = TcpStream::connect(self.bucket)?;
        self.streams.lock().unwrap().push(client.try_clone()?);
        let (mut requests, mut answers) = (BufReader::new(client), BufReader::new(&server));
        let (mut to_client, mut to_server) = (client, &server);
        while let Some(request) = Message::read(&mut requests, true)? {
            request.write(&mut to_server)?;
            let has_body = !request.head.starts_with("HEAD ");
            let Some(mut answer) = Message::read(&mut answers, has_body)? else {
                break;
            };
            let of_row = request.head.lines().next().unwrap().contains("/rows/");
            let twist = self.twist.lock().unwrap().clone();
            match twist {
                Twist::Redirect(status, location) if of_row => {
                    answer.head = format!(
                        "HTTP/1.1 {status} Elsewhere\r\nLocation: {location}\r\n\
                         Content-Length: 0\r\n\r\n"
                    );
                    answer.body.clear();
                }
                Twist::Interim if of_row => {
                    to_client.write_all(
                        b"HTTP/1.1 100 Continue\r\n\r\n\
                          HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n",
                    )?;
                }
                Twist::Chunked if of_row && has_body => {
                    let lines = answer.head.lines();
                    let kept = lines.filter(|line| !line.to_lowercase().contains("content-length"));
                    answer.head = kept.flat_map(|line| [line, "\r\n"]).collect();
                    answer.add("Transfer-Encoding: chunked\r\n");
                    let mut body = Vec::new();
                    for piece in answer.body.chunks(1000) {
                        body.extend(format!("{:x}\r\n", piece.len()).into_bytes());
                        body.extend(piece);
                        body.extend(b"\r\n");
                    }
                    body.extend(b"0\r\n\r\n");
                    answer.body = body;
                }
                Twist::Headers(bytes) if of_row => {
                    answer.add(&format!("X-Much: {}\r\n", "x".repeat(bytes)));
                }
                Twist::Encoded if of_row => answer.add("Content-Encoding: gzip\r\n"),
                _ => {}
            }
            answer.write(&mut to_client)?;
        }
        Ok(())
    }
}
