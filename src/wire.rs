//! The layout that the eBPF programs and this side share, mirrored from `src/bpf/dwell.h`.
//!
//! The header asserts the sizes on its side, and below every size and offset is compared with what the compiled
//! object's own type information says.

#![expect(unsafe_code, reason = "to say of these structs that any bytes make one, and that they have no padding")]

use plain::Plain;

pub(crate) const WAYS: usize = 4;
pub(crate) const SETS: usize = 1024;
const COUNTER_SETS: usize = 128;

/// The elements of the control map, each a `u64` that is 0 or 1: `DWELL_ON` and `DWELL_WAKE`.
#[derive(Debug, Clone, Copy)]
#[repr(u32)]
pub(crate) enum Control {
    On,
    Wake,
}

impl Control {
    pub(crate) const COUNT: u32 = 2;
    /// Only the programs ever clear one.
    pub(crate) const SET: [u8; 8] = 1_u64.to_ne_bytes();

    pub(crate) fn key(self) -> [u8; 4] {
        (self as u32).to_ne_bytes()
    }
}

/// One finished span, as it travels through the ring buffer: `struct dwell_record`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Record {
    pub(crate) start_ns: u64,
    pub(crate) latency_ns: u64,
    pub(crate) ret: u64,
    pub(crate) skb: u64,
    pub(crate) span: u32,
    pub(crate) pid: u32,
    pub(crate) tid: u32,
    pub(crate) cpu_start: u32,
    pub(crate) cpu_end: u32,
    pub(crate) len: u32,
    pub(crate) suspect: u32,
    pub(crate) reserved: u32,
    pub(crate) comm: [u8; 16],
}

/// What is remembered of a started span: `struct dwell_start`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Start {
    pub(crate) ns: u64,
    pub(crate) fingerprint: u64,
    pub(crate) len: u32,
    pub(crate) cpu: u16,
    pub(crate) switches: u16,
}

/// A slot of the in-flight table, free where the key is 0: `struct dwell_slot`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Slot {
    pub(crate) key: u64,
    pub(crate) start: Start,
}

/// What the kernel counts for the ledger: `struct dwell_counters`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Counters {
    pub(crate) started: u64,
    pub(crate) completed: u64,
    pub(crate) untracked: u64,
    pub(crate) overwritten: u64,
    pub(crate) mismatched: u64,
    pub(crate) unmatched: u64,
    pub(crate) ring_dropped: u64,
    pub(crate) reserved: u64,
}

/// All that one span keeps in its `.bss`: `struct dwell_state`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct State {
    pub(crate) counters: [Counters; COUNTER_SETS],
    pub(crate) slots: [Slot; WAYS * SETS],
    pub(crate) overflow_live: u64,
}

// SAFETY: `repr(C)` structs of integers and arrays of them, so every bit pattern is valid; without padding, since
// their sizes are the sums of their members' (checked below against the object's type information).
unsafe impl Plain for Record {}
impl Record {
    /// Reads a record of exactly this size, at any alignment.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut record = Self::default();
        (bytes.len() == size_of::<Self>()).then_some(())?;
        record.copy_from_bytes(bytes).ok()?;
        Some(record)
    }
}

impl State {
    /// The counters' sum over all CPUs, and how many calls are in flight, in the table or behind it.
    pub(crate) fn summary(bytes: &[u8]) -> Option<(Counters, u64)> {
        const WORD: usize = size_of::<u64>();
        (bytes.len() == size_of::<Self>()).then_some(())?;
        let words: Vec<u64> =
            bytes.chunks_exact(WORD).map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default())).collect();
        let (counters, rest) = words.split_at(size_of::<[Counters; COUNTER_SETS]>() / WORD);
        let (slots, rest) = rest.split_at(size_of::<[Slot; WAYS * SETS]>() / WORD);
        let counters = counters.chunks_exact(size_of::<Counters>() / WORD).filter_map(Counters::from_words);
        // Its first member is the key.
        let taken = slots.iter().step_by(size_of::<Slot>() / WORD).filter(|&&key| key != 0).count();
        Some((counters.fold(Counters::default(), Counters::plus), taken as u64 + rest.first()?))
    }
}

impl Counters {
    fn from_words(words: &[u64]) -> Option<Self> {
        let &[started, completed, untracked, overwritten, mismatched, unmatched, ring_dropped, reserved] = words else {
            return None;
        };
        Some(Self { started, completed, untracked, overwritten, mismatched, unmatched, ring_dropped, reserved })
    }

    fn plus(self, other: Self) -> Self {
        Self {
            started: self.started + other.started,
            completed: self.completed + other.completed,
            untracked: self.untracked + other.untracked,
            overwritten: self.overwritten + other.overwritten,
            mismatched: self.mismatched + other.mismatched,
            unmatched: self.unmatched + other.unmatched,
            ring_dropped: self.ring_dropped + other.ring_dropped,
            reserved: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counters are summed over CPUs, and in flight is what the table and the map behind it hold.
    #[test]
    fn summary() {
        let mut words = vec![0_u64; size_of::<State>() / 8];
        for (n, word) in words[..16].iter_mut().enumerate() {
            *word = 1 + n as u64;
        }
        let slots = COUNTER_SETS * 8;
        for slot in [0, 1, WAYS * SETS - 1] {
            words[slots + 4 * slot] = 0xffff_c900_0000_0000;
        }
        // A time stamp beside an empty key is what was left of an ended call.
        words[slots + 4 * 2 + 1] = 7;
        *words.last_mut().unwrap() = 2;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let (counters, open) = State::summary(&bytes).unwrap();
        assert_eq!((counters.started, counters.completed, counters.ring_dropped), (1 + 9, 2 + 10, 7 + 15));
        assert_eq!(open, 5);
        assert!(State::summary(&bytes[8..]).is_none() && State::summary(&[]).is_none());
    }
}
