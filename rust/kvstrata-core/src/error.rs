//! The error of every fallible call: kind, operation, context, source.

use core::fmt;
use std::io;

/// What the caller must do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument of a call is wrong; fix the call. Python: `ValueError`.
    Argument,
    /// The configuration or what lies at the root cannot be used. Python: `ConfigError`.
    Config,
    /// The tier is closed. Python: `ClosedError`.
    Closed,
    /// The kernel still owns arena bytes; call again later. Python: `BusyError`.
    Busy,
    /// The device or file system refused; the operation may work later.
    Unavailable,
    /// Stored bytes are not what they should be; they count as absent.
    Data,
}

/// An error with its operation and context in one line.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<io::Error>,
}

/// Result with this crate's [`Error`].
pub type Result<T> = core::result::Result<T, Error>;

impl Error {
    /// An error of `kind`; `message` is one line, lower case, and names what was expected and got.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            source: None,
        }
    }

    /// A configuration error.
    pub fn config(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Config, message)
    }

    /// A wrong argument.
    pub fn argument(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Argument, message)
    }

    /// The same error caused by `source`, whose text is appended when displayed.
    #[must_use]
    pub fn with_source(mut self, source: io::Error) -> Self {
        self.source = Some(source);
        self
    }

    /// What the caller must do.
    pub const fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The errno behind the error, if the operating system gave one.
    pub fn errno(&self) -> Option<i32> {
        self.source.as_ref().and_then(io::Error::raw_os_error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)?;
        match &self.source {
            Some(source) => write!(formatter, ": {source}"),
            None => Ok(()),
        }
    }
}

impl core::error::Error for Error {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        self.source.as_ref().map(|source| {
            let source: &(dyn core::error::Error + 'static) = source;
            source
        })
    }
}
