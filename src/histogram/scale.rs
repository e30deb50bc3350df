//! The scale: which values share a bucket.
//!
//! Log-linear: each power of two is divided into 16 steps. Below 32 a step is one value; above, a bucket is at most
//! one sixteenth of its lower edge wide. `bpf/histogram.bpf.h` counts by the same rule.

/// Buckets of a histogram.
pub(crate) const BUCKETS: usize = 640;
/// Values from here on have no bucket: 2^43 ns, which is 2 h 26 min.
pub(super) const END: u64 = 1 << 43;

/// Steps per power of two, as a power of two.
const STEP_BITS: u32 = 4;
/// Up to here each value has a bucket of its own.
const EXACT: u64 = 2 << STEP_BITS;

/// The bucket of a value; `None` for what is [`END`] or more.
pub(super) fn index(value: u64) -> Option<usize> {
    if value >= END {
        return None;
    }
    // Up to EXACT there are no bits to leave out.
    let shift = value.max(EXACT - 1).ilog2() - STEP_BITS;
    Some(((shift as usize) << STEP_BITS) + (value >> shift) as usize)
}

/// The lowest value of a bucket.
pub(super) fn lower(index: usize) -> u64 {
    let (steps, shift) = steps(index);
    steps << shift
}

/// The lowest value above a bucket.
pub(super) fn upper(index: usize) -> u64 {
    let (steps, shift) = steps(index);
    (steps + 1) << shift
}

/// A bucket's lower edge as a number of steps, and the width of one as a power of two.
fn steps(index: usize) -> (u64, u32) {
    let index = index.min(BUCKETS - 1) as u64;
    let shift = (index >> STEP_BITS).saturating_sub(1);
    (index - (shift << STEP_BITS), shift as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The buckets lie side by side, from 0 to the end, and each is the one of its edges.
    #[test]
    fn edges_and_indices_are_inverse() {
        let mut end = 0;
        for bucket in 0..BUCKETS {
            assert_eq!(lower(bucket), end, "{bucket}");
            end = upper(bucket);
            let (lowest, highest) = (lower(bucket), end - 1);
            for value in [lowest, lowest + (highest - lowest) / 2, highest] {
                assert_eq!(index(value), Some(bucket), "{value}");
            }
            assert!(16 * (end - lowest) <= lowest.max(16), "[{lowest}, {end}) is too wide");
        }
        assert_eq!(end, END);
    }

    /// As the rule is written down.
    #[test]
    fn follows_the_rule() {
        for value in 0..32 {
            assert_eq!((index(value), lower(value as usize)), (Some(value as usize), value));
        }
        for value in (0..43).flat_map(|power| [(1_u64 << power) - 1, 1 << power, (1 << power) + 1, (3 << power) / 2]) {
            let shift = u64::from(64 - value.leading_zeros()).saturating_sub(5);
            assert_eq!(index(value), Some(((shift << 4) + (value >> shift)) as usize), "{value}");
        }
        assert_eq!((index(1_000), lower(111), upper(111)), (Some(111), 992, 1_024));
    }

    /// Nothing is too large, and 2^43 is where the overflow begins.
    #[test]
    fn ends() {
        assert_eq!((index(END - 1), index(END), index(u64::MAX)), (Some(639), None, None));
        assert_eq!((lower(usize::MAX), upper(usize::MAX)), (31 << 38, END));
    }
}
