//! Connections that can be cut: what is on its way out then goes nowhere, and is held no more.
//!
//! A client that is told to give a request up still writes what it has taken of its body, for as
//! long as the peer takes it. Where the body is a slot, that would keep the slot in use.

use core::fmt;
use core::pin::Pin;
use core::task::{Context, Poll};
use std::io;

use futures_util::task::AtomicWaker;
use hyper::Request;
use hyper::http::Extensions;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{
    CaptureConnection, Connected, Connection, capture_connection,
};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::sys::sync::atomic::{AtomicBool, Ordering};
use crate::sys::sync::{Arc, Mutex, lock};

/// What cuts the connection that a request is sent on. It travels among the request's extensions.
#[derive(Clone, Debug, Default)]
pub(super) struct Cut(Arc<Mutex<Option<CaptureConnection>>>);

impl Cut {
    /// Has the one that came with a request, if one did, know the request's connection.
    pub(super) fn follow<Body>(request: &mut Request<Body>) {
        if let Some(cut) = request.extensions_mut().remove::<Self>() {
            *lock(&cut.0) = Some(capture_connection(request));
        }
    }

    /// Cuts it, where the request has one.
    pub(super) fn cut(&self) {
        let mut found = Extensions::new();
        if let Some(captured) = &*lock(&self.0)
            && let Some(connected) = &*captured.connection_metadata()
        {
            connected.get_extras(&mut found);
        }
        if let Some(switch) = found.get::<Arc<Switch>>() {
            switch.is_cut.store(true, Ordering::Release);
            switch.waker.wake();
        }
    }
}

/// Whether a connection is cut, and who has to hear of it.
#[derive(Default)]
struct Switch {
    is_cut: AtomicBool,
    waker: AtomicWaker,
}

/// A connection to a server.
pub(super) struct Cuttable {
    stream: TokioIo<TcpStream>,
    switch: Arc<Switch>,
}

impl fmt::Debug for Cuttable {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Cuttable").finish_non_exhaustive()
    }
}

impl Cuttable {
    pub(super) fn new(stream: TokioIo<TcpStream>) -> Self {
        Self {
            stream,
            switch: Arc::default(),
        }
    }

    /// Fails once the connection is cut, of which the task is told.
    fn check(&self, context: &Context<'_>) -> io::Result<()> {
        // In this order: whoever cuts after the look wakes the task.
        self.switch.waker.register(context.waker());
        if !self.switch.is_cut.load(Ordering::Acquire) {
            return Ok(());
        }
        // What the kernel has is dropped, too, and the peer hears of it. If not, it hears later.
        let _ = self.stream.inner().set_zero_linger();
        Err(io::ErrorKind::ConnectionAborted.into())
    }

    fn checked(self: Pin<&mut Self>, context: &Context<'_>) -> io::Result<Pin<&mut Stream>> {
        self.check(context)?;
        Ok(Pin::new(&mut self.get_mut().stream))
    }
}

type Stream = TokioIo<TcpStream>;

impl Read for Cuttable {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        self.checked(context)?.poll_read(context, buffer)
    }
}

impl Write for Cuttable {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.checked(context)?.poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.checked(context)?.poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.checked(context)?.poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.checked(context)?.poll_write_vectored(context, pieces)
    }
}

impl Connection for Cuttable {
    fn connected(&self) -> Connected {
        self.stream.connected().extra(Arc::clone(&self.switch))
    }
}
