//! Compares `wire.rs` with what the compiled object says of itself.

use std::mem::offset_of;

use super::span::types;
use crate::wire::{Counters, Record, Slot, Start, State};

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
    suspect,
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

// No padding, as `Plain` demands: the sizes are the sums of the members'.
const _: () = assert!(size_of::<Record>() == 4 * 8 + 8 * 4 + 16);
const _: () = assert!(size_of::<Slot>() == 8 + 2 * 8 + 4 + 2 * 2);
const _: () = assert!(size_of::<State>() == 128 * 8 * 8 + 4096 * 32 + 8);

// What the reader gets of a span is its whole .bss.
const _: () = assert!(offset_of!(types::bss, state) == 0 && size_of::<types::bss>() == size_of::<State>());
