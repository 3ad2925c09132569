//! Which client works: the bucket is tried by one style of addressing, then by the other.

use core::future::Future;

use crate::error::{Error, ErrorKind, Result};
use crate::metrics::Counter;
use crate::object::connect::{Style, connect};
use crate::object::{Addressing, Failure, FailureKind, ObjectOptions, Scheme, Store};
use crate::sys::clock::Clock;
use crate::sys::sync::Arc;

/// A client that works, what trying it out has told, and by which style.
#[derive(Clone, Debug)]
pub(crate) struct Reached<T> {
    pub(crate) store: Store,
    pub(crate) facts: T,
    pub(crate) style: Style,
}

/// What a bucket is tried with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way<'a> {
    pub(crate) options: &'a ObjectOptions,
    /// A client that was given instead.
    pub(crate) given: Option<&'a Store>,
    pub(crate) clock: &'a Arc<dyn Clock>,
    /// Counts what listings leave out.
    pub(crate) odd_names: &'a Arc<Counter>,
}

impl Way<'_> {
    /// The styles to try, one after the other.
    const fn styles(&self) -> &'static [Style] {
        let s3 = matches!(self.options.location.scheme, Scheme::S3);
        match (self.options.addressing, &self.options.endpoint) {
            (Addressing::Virtual, _) | (Addressing::Auto, None) => &[Style::Virtual],
            (Addressing::Auto, Some(_)) if s3 => &[Style::Path, Style::Virtual],
            (Addressing::Path, _) | (Addressing::Auto, Some(_)) => &[Style::Path],
        }
    }

    /// A client. It is made aside: files are read on the way.
    async fn connect(&self, style: Style) -> Result<Store> {
        let options = self.options.clone();
        let (clock, odd_names) = (Arc::clone(self.clock), Arc::clone(self.odd_names));
        let made = move || connect(&options, style, &clock, &odd_names);
        let made = tokio::task::spawn_blocking(made).await;
        made.map_err(|_| Error::new(ErrorKind::Unavailable, "making a client panicked"))?
    }

    /// The client with which `attempt` succeeds.
    ///
    /// # Errors
    /// `Config`: for options that cannot work, or saying what is wrong with the bucket: that it
    /// cannot be used to do `what`.
    pub(crate) async fn reach<T, Attempt>(
        &self,
        what: &str,
        attempt: impl Fn(Store) -> Attempt,
    ) -> Result<Reached<T>>
    where
        Attempt: Future<Output = core::result::Result<T, Failure>>,
    {
        let mut first: Option<Failure> = None;
        for style in self.styles() {
            let store = match self.given {
                Some(given) => Arc::clone(given),
                None => match self.connect(*style).await {
                    Ok(store) => store,
                    // The bucket's name cannot stand before this host's.
                    Err(_) if first.is_some() => break,
                    Err(error) => return Err(error),
                },
            };
            let failure = match attempt(Arc::clone(&store)).await {
                Ok(facts) => {
                    return Ok(Reached {
                        store,
                        facts,
                        style: *style,
                    });
                }
                Err(failure) => failure,
            };
            let elsewhere = matches!(
                failure.kind,
                FailureKind::Addressing
                    | FailureKind::Rejected
                    | FailureKind::NoBucket
                    | FailureKind::Missing
            );
            first.get_or_insert(failure);
            if !elsewhere {
                break;
            }
        }
        let failure = first.unwrap_or_else(|| Failure::new(FailureKind::Other, "not tried"));
        Err::<Reached<T>, Error>(self.options.unusable(what, &failure))
    }
}
