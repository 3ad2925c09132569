//! 16 bytes looked at together.

/// Which of 16 bytes have a value, a bit each, the lowest first.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn equal(all: u128, value: u8) -> u32 {
    use core::arch::x86_64::{_mm_cmpeq_epi8, _mm_movemask_epi8, _mm_set_epi64x, _mm_set1_epi8};
    #[expect(
        clippy::as_conversions,
        clippy::cast_possible_truncation,
        reason = "both halves are taken"
    )]
    let (high, low) = ((all >> 64) as u64, all as u64);
    #[expect(unsafe_code, reason = "the one way to say it")]
    // SAFETY: every x86-64 processor has these instructions, which look at nothing but numbers.
    let found = unsafe {
        let all = _mm_set_epi64x(high.cast_signed(), low.cast_signed());
        _mm_movemask_epi8(_mm_cmpeq_epi8(all, _mm_set1_epi8(value.cast_signed())))
    };
    found.cast_unsigned()
}

/// Which of 16 bytes have a value, a bit each, the lowest first.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn equal(all: u128, value: u8) -> u32 {
    let all = (0..).zip(all.to_le_bytes());
    all.fold(0, |found, (at, byte)| {
        found | u32::from(byte == value) << at
    })
}

#[cfg(test)]
mod tests {
    use super::equal;

    #[test]
    fn each_byte_has_its_bit() {
        let all = u128::from_le_bytes([9, 0, 7, 9, 255, 128, 0, 0, 0, 1, 0, 0, 0, 0, 0, 9]);
        assert_eq!(equal(all, 9), 0b1000_0000_0000_1001);
        assert_eq!(equal(all, 255), 0b1_0000);
        assert_eq!(equal(all, 128), 0b10_0000);
        assert_eq!(equal(all, 3), 0);
        assert_eq!(equal(u128::MAX, 255), 0xffff);
    }
}
