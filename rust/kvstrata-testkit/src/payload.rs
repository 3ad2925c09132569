//! Bytes that tell which key they belong to.

/// Bytes derived from `seed` (a key, say): the same seed gives the same bytes, another seed
/// others in every 8 bytes (but for chance).
pub fn payload(seed: &[u8], length: usize) -> Vec<u8> {
    let mut state = seed.iter().fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3)
    });
    let mut bytes = Vec::with_capacity(length.saturating_add(8));
    while bytes.len() < length {
        bytes.extend(next(&mut state).to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// The next number of a simple sequence (Steele, Lea, Flood: `SplitMix64`), for reproducible
/// choices in tests.
pub fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_is_its_seeds_and_no_others() {
        assert_eq!(payload(b"a", 100), payload(b"a", 100));
        assert_eq!(
            payload(b"a", 100).get(..9),
            Some(payload(b"a", 9).as_slice())
        );
        assert_ne!(payload(b"a", 8), payload(b"b", 8));
    }
}
