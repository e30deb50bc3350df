//! Which pairs can be trusted.
//!
//! The kernel skips a program that is already running on that CPU, as when a task was preempted inside it. If that
//! befalls the exit of one call, its start stays behind; if it then befalls the entry of a later call of the same
//! thread at the same depth of its stack, that call's exit finds the stale start. Mostly the fingerprint tells, but a
//! thread may well call a function with the same arguments again.
//!
//! What always tells is the kernel's own count of skipped entries: a pair can only be wrong if an entry was skipped
//! between its start and its end. So where the programs can't rule it out, this count is looked at, and a pair that
//! isn't certain is no latency.

use crate::event::MonotonicTime;

/// When a span's entries are known to have been skipped.
#[derive(Debug)]
pub(super) struct SkippedEntries {
    count: u64,
    /// All skipped entries so far were skipped before this.
    before: MonotonicTime,
}

impl SkippedEntries {
    /// Nothing has been skipped of a program that has just been loaded.
    pub(super) fn new() -> Self {
        Self { count: 0, before: MonotonicTime::from_nanos(0) }
    }

    /// Notes the kernel's count, which was read before `now`.
    pub(super) fn note(&mut self, count: u64, now: MonotonicTime) {
        if count != self.count {
            *self = Self { count, before: now };
        }
    }

    /// Whether no entry was skipped from `start` to the end of the pair, which lies before the last `note`.
    pub(super) fn none_since(&self, start: MonotonicTime) -> bool {
        self.before < start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pair is certain if all skips were noticed before it began.
    #[test]
    fn certainty() {
        let at = MonotonicTime::from_nanos;
        let mut skipped = SkippedEntries::new();
        skipped.note(0, at(100));
        assert!(skipped.none_since(at(1)));
        skipped.note(3, at(200));
        assert!(!skipped.none_since(at(150)), "skipped between 100 and 200");
        assert!(!skipped.none_since(at(200)));
        assert!(skipped.none_since(at(201)));
        skipped.note(3, at(300));
        assert!(skipped.none_since(at(201)), "nothing was skipped since 200");
        skipped.note(4, at(400));
        assert!(!skipped.none_since(at(201)));
        assert!(!skipped.none_since(at(399)));
    }
}
