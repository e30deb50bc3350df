//! Compares `wire.rs` with what the compiled object says of itself.

use std::mem::offset_of;

use super::skel::{call, hook, session};
use crate::wire::{
    Counters, FullRecord, IdentifiedRecord, KeyedRecord, RawFlow, RawHistogram, RawIdentity, RawStory, Record,
    RingHead, Slot, SlowestHead, Start, State,
};

/// Asserts that two structs have one size, and the named members at the same offsets.
macro_rules! same_layout {
    ($ours:ident, $theirs:path, $($member:ident),+) => {
        const _: () = {
            use $theirs as Theirs;
            assert!(size_of::<$ours>() == size_of::<Theirs>());
            $(assert!(offset_of!($ours, $member) == offset_of!(Theirs, $member));)+
        };
    };
}

same_layout!(
    Record,
    call::types::dwell_record,
    start_ns,
    latency_ns,
    ret,
    skb,
    end,
    suspect,
    len,
    cpu_start,
    cpu_end,
    pid,
    tid,
    unused,
    comm
);
same_layout!(KeyedRecord, hook::types::dwell_keyed_record, record, key, outcome, reason, flow);
same_layout!(RawFlow, hook::types::dwell_flow, saddr, daddr, sport, dport, version, protocol, unused);
same_layout!(
    RawIdentity,
    hook::types::dwell_identity,
    flow,
    cgroup,
    cookie,
    known,
    len,
    seq,
    mark,
    hash,
    netns,
    interface,
    received_on,
    vlan,
    queue,
    tos,
    ttl,
    tcp_flags,
    direction
);
same_layout!(IdentifiedRecord, hook::types::dwell_identified_record, keyed, identity);
same_layout!(RawStory, hook::types::dwell_story, switches, context, bytes, stack);
same_layout!(FullRecord, hook::types::dwell_full_record, identified, story);
same_layout!(Start, call::types::dwell_start, ns, fingerprint, stint, len, cpu, group);
same_layout!(Slot, call::types::dwell_slot, key, start, starts, unused);
same_layout!(
    Counters,
    call::types::dwell_counters,
    started,
    emitted,
    unmatched,
    overwritten,
    mismatched,
    untracked,
    ring_dropped,
    abandoned,
    expired,
    unkeyed,
    unseen,
    unparsed,
    reserved
);
same_layout!(RawHistogram, call::types::dwell_histogram, sum, max, min, beyond, buckets);
same_layout!(RingHead, call::types::dwell_ring_head, head, unused, limit, unused_too);
same_layout!(
    SlowestHead,
    call::types::dwell_slowest,
    generation,
    least,
    which,
    lock,
    unkept,
    next_least,
    next_which,
    unused
);
same_layout!(State, call::types::dwell_state, slots, counters, overflow_live);

// No padding, as `Plain` demands: the sizes are the sums of the members'.
const _: () = assert!(size_of::<Record>() == 4 * 8 + 8 * 4 + 16);
const _: () = assert!(size_of::<KeyedRecord>() == size_of::<Record>() + 8 + 2 * 4 + size_of::<RawFlow>());
const _: () = assert!(size_of::<IdentifiedRecord>() == size_of::<KeyedRecord>() + size_of::<RawIdentity>());
const _: () = assert!(size_of::<FullRecord>() == size_of::<IdentifiedRecord>() + size_of::<RawStory>());
const _: () = assert!(size_of::<RawStory>() == 8 + 2 * 4 + 64 * 8);
const _: () = assert!(size_of::<RawIdentity>() == size_of::<RawFlow>() + 2 * 8 + 8 * 4 + 2 * 2 + 4);
const _: () = assert!(size_of::<RawFlow>() == 2 * 16 + 2 * 2 + 4);
const _: () = assert!(size_of::<Slot>() == 3 * 8 + 4 * 8 + 2 * 4);
const _: () = assert!(size_of::<State>() == 128 * 16 * 8 + 4096 * 64 + 8);

// What the reader gets of a span is its whole .bss, which all objects have alike.
const _: () = assert!(offset_of!(call::types::bss, state) == 0 && size_of::<call::types::bss>() == size_of::<State>());
const _: () = assert!(offset_of!(hook::types::bss, state) == 0 && size_of::<hook::types::bss>() == size_of::<State>());
const _: () =
    assert!(offset_of!(session::types::bss, state) == 0 && size_of::<session::types::bss>() == size_of::<State>());
