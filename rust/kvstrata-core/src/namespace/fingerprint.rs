//! The digest of bytes that a manifest names instead of holding them: a model's weight files.

/// A blake3 digest that is made piece by piece.
#[derive(Clone, Debug, Default)]
pub struct Fingerprint(blake3::Hasher);

impl Fingerprint {
    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all bytes so far: 64 lower-case hexadecimal digits.
    pub fn hexadecimal(&self) -> String {
        self.0.finalize().to_hex().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::Fingerprint;

    #[test]
    fn pieces_give_the_digest_of_the_whole() {
        let mut pieces = Fingerprint::default();
        pieces.update(b"ab");
        pieces.update(b"");
        pieces.update(b"c");
        // The published test vector of blake3 for "abc".
        let expected = "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85";
        assert_eq!(pieces.hexadecimal(), expected);
    }
}
