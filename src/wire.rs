//! The layout that the eBPF programs and this side share, mirrored from `src/bpf/dwell.h`.
//!
//! The header asserts the sizes on its side, and below every size and offset is compared with what the compiled
//! object's own type information says.

#![expect(unsafe_code, reason = "to say of these structs that any bytes make one, and that they have no padding")]

use plain::Plain;

pub(crate) const WAYS: usize = 4;
pub(crate) const SETS: usize = 1024;
const COUNTER_SETS: usize = 128;

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
    pub(crate) switched: u32,
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

/// How the reader wants to be treated: `struct dwell_control`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Control {
    pub(crate) wake: u32,
    pub(crate) reserved: u32,
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
// SAFETY: as above.
unsafe impl Plain for State {}
// SAFETY: as above.
unsafe impl Plain for Control {}

impl Control {
    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: `Control` has no padding (its size is asserted below), so every byte of it is initialised.
        unsafe { plain::as_bytes(self) }
    }
}

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
    /// The sum over all CPUs, and how many slots of the table are taken.
    pub(crate) fn summary(bytes: &[u8]) -> Option<(Counters, u64)> {
        // Borrowed, not copied: it is 136 KiB. A map's value comes in a fresh allocation, so it is aligned; where an
        // allocator does otherwise, a copy is made.
        let copy;
        let state = match plain::from_bytes::<Self>(bytes) {
            Ok(state) => state,
            Err(plain::Error::BadAlignment) => {
                copy = Self::boxed_copy(bytes)?;
                &*copy
            }
            Err(plain::Error::TooShort) => return None,
        };
        let taken = state.slots.iter().filter(|slot| slot.key != 0).count();
        Some((state.counters.iter().copied().fold(Counters::default(), Counters::plus), taken as u64))
    }

    fn boxed_copy(bytes: &[u8]) -> Option<Box<Self>> {
        let mut state = Box::new(Self {
            counters: [Counters::default(); COUNTER_SETS],
            slots: [Slot::default(); WAYS * SETS],
            overflow_live: 0,
        });
        state.copy_from_bytes(bytes).ok()?;
        Some(state)
    }
}

impl Counters {
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

/// What the compiled object says of the layouts above.
#[cfg(not(dwell_docs))]
mod layout {
    use std::mem::offset_of;

    use super::{Control, Counters, Record, Slot, Start, State};
    use crate::driver::types;

    /// Asserts that two structs have one size, and the named members at the same offsets.
    macro_rules! same_layout {
        ($ours:ident, $theirs:ident, $($member:ident),+) => {
            const _: () = assert!(size_of::<$ours>() == size_of::<types::$theirs>());
            $(const _: () = assert!(offset_of!($ours, $member) == offset_of!(types::$theirs, $member));)+
        };
    }

    same_layout!(
        Record,
        dwell_record,
        start_ns,
        latency_ns,
        ret,
        skb,
        span,
        pid,
        tid,
        cpu_start,
        cpu_end,
        len,
        switched,
        reserved,
        comm
    );
    same_layout!(Start, dwell_start, ns, fingerprint, len, cpu, switches);
    same_layout!(Slot, dwell_slot, key, start);
    same_layout!(
        Counters,
        dwell_counters,
        started,
        completed,
        untracked,
        overwritten,
        mismatched,
        unmatched,
        ring_dropped,
        reserved
    );
    same_layout!(State, dwell_state, counters, slots, overflow_live);
    same_layout!(Control, dwell_control, wake, reserved);

    // No padding, as `Plain` demands: the sizes are the sums of the members'.
    const _: () = assert!(size_of::<Record>() == 4 * 8 + 8 * 4 + 16);
    const _: () = assert!(size_of::<Slot>() == 8 + 2 * 8 + 4 + 2 * 2);
    const _: () = assert!(size_of::<State>() == 128 * 8 * 8 + 4096 * 32 + 8);
    const _: () = assert!(size_of::<Control>() == 8);
}
