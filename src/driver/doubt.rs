//! Which pairs can be trusted.
//!
//! The kernel skips a program that is already running on that CPU, as when a task was preempted inside it. If that
//! befalls the exit of one call, its start stays behind; if it then befalls the entry of a later call of the same
//! thread at the same depth of its stack, that call's exit finds the stale start. Mostly the fingerprint tells, but a
//! thread may well call a function with the same arguments again.
//!
//! What always tells are the kernel's own counts of skipped programs: a pair can only be wrong if an exit and an entry
//! were skipped between its start and its end. So where the programs can't rule it out, these counts are looked at, and
//! a pair that isn't certain is no latency.

use crate::event::MonotonicTime;

/// How often the kernel has skipped a span's programs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Skipped {
    pub(crate) entries: u64,
    pub(crate) exits: u64,
}

/// When a span's programs are known to have been skipped.
#[derive(Debug)]
pub(super) struct Doubt {
    counts: Skipped,
    /// All skipped entries so far were skipped before this.
    entries_before: MonotonicTime,
    /// All skipped exits so far were skipped before this.
    exits_before: MonotonicTime,
}

impl Doubt {
    /// Nothing has been skipped of programs that have just been loaded.
    pub(super) fn new() -> Self {
        let never = MonotonicTime::from_nanos(0);
        Self { counts: Skipped::default(), entries_before: never, exits_before: never }
    }

    /// Notes the kernel's counts, which were read before `now`.
    pub(super) fn note(&mut self, counts: Skipped, now: MonotonicTime) {
        if counts.entries != self.counts.entries {
            self.entries_before = now;
        }
        if counts.exits != self.counts.exits {
            self.exits_before = now;
        }
        self.counts = counts;
    }

    /// Whether a pair that began at `start`, and ended before the last `note`, is certain.
    pub(super) fn is_ruled_out(&self, start: MonotonicTime) -> bool {
        self.entries_before < start || self.exits_before < start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pair is certain unless both an entry and an exit may have been skipped since it began.
    #[test]
    fn certainty() {
        let at = MonotonicTime::from_nanos;
        let skipped = |entries, exits| Skipped { entries, exits };
        let mut doubt = Doubt::new();
        doubt.note(skipped(0, 0), at(100));
        assert!(doubt.is_ruled_out(at(1)));
        doubt.note(skipped(3, 0), at(200));
        assert!(doubt.is_ruled_out(at(1)), "without a skipped exit no start is stale");
        doubt.note(skipped(3, 1), at(300));
        assert!(!doubt.is_ruled_out(at(150)), "an entry may have been skipped until 200, an exit until 300");
        assert!(!doubt.is_ruled_out(at(200)));
        assert!(doubt.is_ruled_out(at(201)), "no entry was skipped since 200");
        doubt.note(skipped(3, 1), at(400));
        assert!(doubt.is_ruled_out(at(201)), "and none since");
        doubt.note(skipped(4, 1), at(500));
        assert!(!doubt.is_ruled_out(at(300)));
        assert!(doubt.is_ruled_out(at(301)), "no exit was skipped since 300");
        doubt.note(skipped(4, 2), at(600));
        assert!(!doubt.is_ruled_out(at(301)));
        assert!(doubt.is_ruled_out(at(501)));
    }
}
