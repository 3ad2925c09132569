//! What a policy is told of a request.

/// What stands for a key in a policy: equal for equal keys. Two keys that share one, which is as
/// likely as a collision of 64 random bits, cost a wrong prediction and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub u64);

/// Number of a request, given by the caller, unique among the requests that are open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// What follows a request, where its caller says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Hint {
    /// Nothing is known.
    #[default]
    None,
    /// The response calls a tool: the next turn comes when the tool has answered.
    ToolUse,
    /// The turn ends: the next one comes when a person has written it.
    EndOfTurn,
}

/// Turn context of a request, as far as it is known at its arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Context {
    /// Tokens of the prompt.
    pub prompt_tokens: Option<u32>,
    /// Tokens of the prompt that were in no earlier request. Where it is `None`, a policy counts
    /// the keys that it has not seen and takes all keys to have the same number of tokens.
    pub new_tokens: Option<u32>,
    /// What follows.
    pub hint: Hint,
}

/// The arrival of a request: all its keys of one class, in token order, found or not.
#[derive(Clone, Copy, Debug)]
pub struct Arrival<'a> {
    /// Which request.
    pub id: RequestId,
    /// The class of its keys.
    pub class: super::Class,
    /// All of its keys.
    pub tags: &'a [Tag],
    /// What else is known.
    pub context: Context,
}

/// A key of a request that has ended, for callers that tell of requests only then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedKey {
    /// Which key.
    pub tag: Tag,
    /// Its entry, if it is there.
    pub entry: Option<super::EntryId>,
    /// Whether the request stored it and did not use it otherwise.
    pub stored: bool,
    /// Whether the request used what an earlier one had stored.
    pub used: bool,
}

/// How much space is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// So many rows.
    Rows(usize),
    /// So many bytes of rows.
    Bytes(u64),
}

impl Need {
    /// The number of rows of `row_bytes` bytes that give the space.
    pub fn rows(self, row_bytes: u64) -> usize {
        match self {
            Self::Rows(rows) => rows,
            Self::Bytes(bytes) => {
                usize::try_from(bytes.div_ceil(row_bytes.max(1))).unwrap_or(usize::MAX)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_given_by_whole_rows() {
        assert_eq!(Need::Rows(3).rows(4096), 3);
        assert_eq!(Need::Bytes(0).rows(4096), 0);
        assert_eq!(Need::Bytes(4096).rows(4096), 1);
        assert_eq!(Need::Bytes(4097).rows(4096), 2);
        assert_eq!(Need::Bytes(7).rows(0), 7);
    }
}
