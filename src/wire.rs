//! The layout that the eBPF programs and this side share, mirrored from `src/bpf/dwell.h`.
//!
//! The header asserts the sizes on its side, and below every size and offset is compared with what the compiled
//! object's own type information says.

#![expect(unsafe_code, reason = "to say of these structs that any bytes make one, and that they have no padding")]

use plain::Plain;

pub(crate) const WAYS: usize = 4;
pub(crate) const SETS: usize = 1024;
const COUNTER_SETS: usize = 128;

/// One finished call, as it travels through a ring: `struct dwell_record`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Record {
    pub(crate) start_ns: u64,
    pub(crate) latency_ns: u64,
    pub(crate) ret: u64,
    pub(crate) skb: u64,
    pub(crate) end: u32,
    pub(crate) suspect: u32,
    pub(crate) len: u32,
    pub(crate) cpu_start: u32,
    pub(crate) cpu_end: u32,
    pub(crate) pid: u32,
    pub(crate) tid: u32,
    pub(crate) unused: u32,
    pub(crate) comm: [u8; 16],
}

/// Protocol, addresses and ports, the latter in network byte order: `struct dwell_flow`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub(crate) struct RawFlow {
    pub(crate) saddr: [u8; 16],
    pub(crate) daddr: [u8; 16],
    pub(crate) sport: [u8; 2],
    pub(crate) dport: [u8; 2],
    pub(crate) version: u8,
    pub(crate) protocol: u8,
    pub(crate) unused: [u8; 2],
}

/// One finished span between two hooks: `struct dwell_keyed_record`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct KeyedRecord {
    pub(crate) record: Record,
    pub(crate) key: u64,
    /// One of [`outcome`].
    pub(crate) outcome: u32,
    pub(crate) reason: u32,
    pub(crate) flow: RawFlow,
}

/// Whose packet it was: `struct dwell_identity`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub(crate) struct RawIdentity {
    pub(crate) flow: RawFlow,
    pub(crate) cgroup: u64,
    pub(crate) cookie: u64,
    /// Of [`known`].
    pub(crate) known: u32,
    pub(crate) len: u32,
    pub(crate) seq: u32,
    pub(crate) mark: u32,
    pub(crate) hash: u32,
    pub(crate) netns: u32,
    pub(crate) interface: u32,
    pub(crate) received_on: u32,
    pub(crate) vlan: u16,
    pub(crate) queue: u16,
    pub(crate) tos: u8,
    pub(crate) ttl: u8,
    pub(crate) tcp_flags: u8,
    /// One of [`direction`].
    pub(crate) direction: u8,
}

/// What of an identity is known: `enum dwell_known`.
pub(crate) mod known {
    pub(crate) const VERSION: u32 = 1 << 0;
    pub(crate) const PROTOCOL: u32 = 1 << 1;
    pub(crate) const ADDRESSES: u32 = 1 << 2;
    pub(crate) const SPORT: u32 = 1 << 3;
    pub(crate) const DPORT: u32 = 1 << 4;
    pub(crate) const HEADER: u32 = 1 << 5;
    pub(crate) const TCP: u32 = 1 << 6;
    pub(crate) const VLAN: u32 = 1 << 7;
    pub(crate) const PACKET: u32 = 1 << 8;
    pub(crate) const MARK: u32 = 1 << 9;
    pub(crate) const QUEUE: u32 = 1 << 10;
    pub(crate) const INTERFACE: u32 = 1 << 11;
    pub(crate) const RECEIVED: u32 = 1 << 12;
    pub(crate) const NETNS: u32 = 1 << 13;
    pub(crate) const CGROUP: u32 = 1 << 14;
    pub(crate) const COOKIE: u32 = 1 << 15;
    pub(crate) const NOT_IP: u32 = 1 << 16;
}

/// Which way a packet goes: `enum dwell_direction`.
pub(crate) mod direction {
    pub(crate) const OUTGOING: u8 = 1;
    pub(crate) const INCOMING: u8 = 2;
}

/// A record of either kind, with an identity: `struct dwell_identified_record`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct IdentifiedRecord {
    /// Of a call, what is behind its `record` is unset.
    pub(crate) keyed: KeyedRecord,
    pub(crate) identity: RawIdentity,
}

/// For whom a CPU works: `enum dwell_context`.
pub(crate) mod context {
    pub(crate) const TASK: u32 = 1;
    pub(crate) const SOFTIRQ: u32 = 2;
    pub(crate) const HARDIRQ: u32 = 3;
    pub(crate) const NMI: u32 = 4;
    pub(crate) const IDLE: u32 = 5;
}

const STACK: usize = 64;

/// What the kernel was doing at the end of a span: `struct dwell_story`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RawStory {
    pub(crate) switches: u64,
    /// One of [`context`].
    pub(crate) context: u32,
    /// Of the stack; negative: there is none.
    pub(crate) bytes: i32,
    pub(crate) stack: [u64; STACK],
}

impl RawStory {
    pub(crate) const UNKNOWN_SWITCHES: u64 = u64::MAX;

    /// The stack's return addresses; what is left in memory behind them isn't.
    pub(crate) fn addresses(&self) -> &[u64] {
        let frames = usize::try_from(self.bytes).unwrap_or(0) / size_of::<u64>();
        self.stack.get(..frames).unwrap_or_default()
    }
}

impl Default for RawStory {
    fn default() -> Self {
        Self { switches: 0, context: 0, bytes: 0, stack: [0; STACK] }
    }
}

/// A record of either kind, with a story: `struct dwell_full_record`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct FullRecord {
    /// What it hasn't is unset.
    pub(crate) identified: IdentifiedRecord,
    pub(crate) story: RawStory,
}

/// The bytes of records: of calls, with a key, with an identity, and with a story.
pub(crate) const SHORT: usize = size_of::<Record>();
pub(crate) const LONG: usize = size_of::<KeyedRecord>();
pub(crate) const IDENTIFIED: usize = size_of::<IdentifiedRecord>();
pub(crate) const FULL: usize = size_of::<FullRecord>();

/// How a span between two hooks ended: `enum dwell_outcome`.
pub(crate) mod outcome {
    pub(crate) const REACHED: u32 = 0;
    pub(crate) const DROPPED: u32 = 1;
    pub(crate) const CONSUMED: u32 = 2;
    pub(crate) const RELEASED: u32 = 3;
}

/// What is remembered of a started span: `struct dwell_start`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Start {
    pub(crate) ns: u64,
    pub(crate) fingerprint: u64,
    pub(crate) stint: u64,
    pub(crate) len: u32,
    pub(crate) cpu: u32,
    pub(crate) group: u64,
}

/// A start and whose packet it was: what the overflow map has where events tell that. `struct waiting`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Waiting {
    pub(crate) start: Start,
    pub(crate) identity: RawIdentity,
}

/// A slot of the in-flight table, free where the key is 0: `struct dwell_slot`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Slot {
    pub(crate) key: u64,
    pub(crate) start: Start,
    pub(crate) starts: u64,
    pub(crate) unused: u64,
}

/// What the kernel counts for the ledger: `struct dwell_counters`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Counters {
    pub(crate) started: u64,
    pub(crate) emitted: u64,
    pub(crate) unmatched: u64,
    pub(crate) overwritten: u64,
    pub(crate) mismatched: u64,
    pub(crate) untracked: u64,
    pub(crate) ring_dropped: u64,
    pub(crate) abandoned: u64,
    pub(crate) expired: u64,
    pub(crate) unkeyed: u64,
    pub(crate) unseen: u64,
    pub(crate) unparsed: u64,
    pub(crate) reserved: [u64; 4],
}

/// One CPU's latencies of a span, or one group's: `struct dwell_histogram`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct RawHistogram {
    pub(crate) sum: u64,
    pub(crate) max: u64,
    pub(crate) min: u64,
    pub(crate) beyond: u64,
    pub(crate) buckets: [u64; 640],
}

/// What each CPU's ring begins with: `struct dwell_ring_head`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct RingHead {
    pub(crate) head: u64,
    pub(crate) unused: [u64; 7],
    pub(crate) limit: u64,
    pub(crate) unused_too: [u64; 7],
}

/// What the slowest spans of one CPU begin with: `struct dwell_slowest`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct SlowestHead {
    pub(crate) generation: u64,
    pub(crate) least: u64,
    pub(crate) which: u64,
    pub(crate) lock: u64,
    pub(crate) unkept: u64,
    pub(crate) next_least: u64,
    pub(crate) next_which: u64,
    pub(crate) unused: u64,
}

/// All that one span keeps in its `.bss`: `struct dwell_state`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct State {
    pub(crate) slots: [Slot; WAYS * SETS],
    pub(crate) counters: [Counters; COUNTER_SETS],
    pub(crate) overflow_live: u64,
}

// SAFETY: `repr(C)` structs of integers and arrays of them, so every bit pattern is valid; without padding, since
// their sizes are the sums of their members' (checked below against the object's type information).
unsafe impl Plain for Record {}
// SAFETY: as above.
unsafe impl Plain for KeyedRecord {}
// SAFETY: as above.
unsafe impl Plain for IdentifiedRecord {}
// SAFETY: as above.
unsafe impl Plain for FullRecord {}

/// The words that the kernel wrote; what is less than one at the end isn't there.
pub(crate) fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default())).collect()
}

/// What the bytes of `struct dwell_state` tell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    /// The sum over all CPUs.
    pub(crate) counters: Counters,
    /// Started spans in the table that haven't expired.
    pub(crate) waiting: u64,
    /// Those that have.
    pub(crate) expired: u64,
    /// Those that were taken out of the overflow map, which the bytes don't tell.
    pub(crate) swept: u64,
    /// Entries of the overflow map, as far as the programs know.
    pub(crate) overflow: u64,
}

impl State {
    /// Counts what is in `bytes`. What started before `oldest` (nanoseconds of `CLOCK_MONOTONIC`) has expired.
    pub(crate) fn summary(bytes: &[u8], oldest: u64) -> Option<Summary> {
        const WORD: usize = size_of::<u64>();
        (bytes.len() == size_of::<Self>()).then_some(())?;
        let words = words(bytes);
        let (slots, rest) = words.split_at(size_of::<[Slot; WAYS * SETS]>() / WORD);
        let (counters, rest) = rest.split_at(size_of::<[Counters; COUNTER_SETS]>() / WORD);
        let counters = counters.chunks_exact(size_of::<Counters>() / WORD).filter_map(Counters::from_words);
        let mut summary = Summary {
            counters: counters.fold(Counters::default(), Counters::plus),
            overflow: *rest.first()?,
            ..Summary::default()
        };
        // A slot's first words are the key and the time, its seventh the starts that were counted in it.
        for slot in slots.chunks_exact(size_of::<Slot>() / WORD) {
            summary.counters.started = summary.counters.started.saturating_add(slot.get(6).copied().unwrap_or(0));
            match *slot {
                // Free; or a call that began before the probe was switched on.
                [0, ..] | [_, 0, ..] => {}
                [_, ns, ..] if ns < oldest => summary.expired += 1,
                _ => summary.waiting += 1,
            }
        }
        Some(summary)
    }
}

impl SlowestHead {
    /// What user space wants to know of it.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let words = words(bytes.get(..size_of::<Self>()).unwrap_or_default());
        let &[generation, least, which, lock, unkept, ..] = &*words else { return Self::default() };
        Self { generation, least, which, lock, unkept, ..Self::default() }
    }
}

impl Start {
    /// When it started, of the bytes of one of the overflow map's values.
    pub(crate) fn time(bytes: &[u8]) -> Option<u64> {
        Some(u64::from_ne_bytes(bytes.get(..size_of::<u64>())?.try_into().ok()?))
    }
}

impl Counters {
    fn from_words(words: &[u64]) -> Option<Self> {
        let &[started, emitted, unmatched, overwritten, mismatched, untracked, ring_dropped, ref rest @ ..] = words
        else {
            return None;
        };
        let &[abandoned, expired, unkeyed, unseen, unparsed, ..] = rest else { return None };
        Some(Self {
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
            reserved: [0; 4],
        })
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            started: self.started.saturating_add(other.started),
            emitted: self.emitted.saturating_add(other.emitted),
            unmatched: self.unmatched.saturating_add(other.unmatched),
            overwritten: self.overwritten.saturating_add(other.overwritten),
            mismatched: self.mismatched.saturating_add(other.mismatched),
            untracked: self.untracked.saturating_add(other.untracked),
            ring_dropped: self.ring_dropped.saturating_add(other.ring_dropped),
            abandoned: self.abandoned.saturating_add(other.abandoned),
            expired: self.expired.saturating_add(other.expired),
            unkeyed: self.unkeyed.saturating_add(other.unkeyed),
            unseen: self.unseen.saturating_add(other.unseen),
            unparsed: self.unparsed.saturating_add(other.unparsed),
            reserved: [0; 4],
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
        let counters = WAYS * SETS * 8;
        for (n, word) in words[counters..counters + 32].iter_mut().enumerate() {
            *word = 1 + n as u64;
        }
        let slots = 0;
        for (slot, ns) in [(0, 500), (1, 1_000), (WAYS * SETS - 1, 1_001)] {
            words[slots + 8 * slot] = 0xffff_c900_0000_0000;
            words[slots + 8 * slot + 1] = ns;
        }
        words[slots + 8 * 3 + 6] = 1_000;
        // A time stamp beside an empty key is what was left of an ended call.
        words[slots + 8 * 2 + 1] = 7;
        *words.last_mut().unwrap() = 2;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let summary = State::summary(&bytes, 1_000).unwrap();
        let counters = summary.counters;
        assert_eq!((counters.started, counters.emitted, counters.unkeyed), (1 + 17 + 1_000, 2 + 18, 10 + 26));
        assert_eq!((summary.waiting, summary.expired, summary.overflow), (2, 1, 2));
        assert_eq!(State::summary(&bytes, 0).unwrap().waiting, 3);
        assert!(State::summary(&bytes[8..], 0).is_none() && State::summary(&[], 0).is_none());
        // Whatever is there, it is counted as far as a count goes.
        let all = vec![0xff; size_of::<State>()];
        assert_eq!(State::summary(&all, 0).unwrap().counters.started, u64::MAX);
    }
}
