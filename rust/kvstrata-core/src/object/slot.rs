//! A slot as the body of an upload: the bytes leave straight from it.

use bytes::Bytes;
use tokio::sync::oneshot;

use crate::buffer::Arena;
use crate::sys::sync::Arc;

/// Keeps a slot in use, and tells when it no longer is.
struct SlotHold {
    arena: Arc<Arena>,
    offset: usize,
    length: usize,
    released: Option<oneshot::Sender<()>>,
}

impl AsRef<[u8]> for SlotHold {
    fn as_ref(&self) -> &[u8] {
        self.arena.bytes(self.offset, self.length).unwrap_or(&[])
    }
}

impl Drop for SlotHold {
    fn drop(&mut self) {
        if let Some(released) = self.released.take() {
            // Nobody waits any more: the tier was closed with the slot in use.
            let _ = released.send(());
        }
    }
}

/// The bytes of a slot, and what tells that the last copy of them is gone: until then the HTTP
/// client may read the slot, also after its request was given up.
pub(super) fn lend(
    arena: &Arc<Arena>,
    offset: usize,
    length: usize,
) -> (Bytes, oneshot::Receiver<()>) {
    let (sender, receiver) = oneshot::channel();
    let hold = SlotHold {
        arena: Arc::clone(arena),
        offset,
        length,
        released: Some(sender),
    };
    (Bytes::from_owner(hold), receiver)
}
