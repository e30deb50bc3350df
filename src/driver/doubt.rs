//! Which pairs can be trusted.
//!
//! The kernel skips a program that is already running on that CPU, as when a task was preempted inside it. If that
//! befalls the exit of one call, its start stays behind; if it then befalls the entry of a later call of the same
//! thread at the same depth of its stack, that call's exit finds the stale start. Mostly the fingerprint tells, but a
//! thread may well call a function with the same arguments again.
//!
//! What always tells is the kernel's own count of skipped entries: a pair can only be wrong if an entry was skipped
//! between its start and its end. So where the program can't rule it out, this count is looked at, and a pair that isn't
//! certain is no latency. (That an exit was skipped as well proves nothing: exits are also lost, and not counted, when
//! anybody attaches to or detaches from the function.)

use crate::event::MonotonicTime;

/// When a span's entries are known to have been skipped.
#[derive(Debug)]
pub(super) struct Doubt {
    entries: u64,
    /// All skipped entries so far were skipped before this.
    before: MonotonicTime,
}

impl Doubt {
    /// Nothing has been skipped of programs that have just been loaded.
    pub(super) fn new() -> Self {
        Self { entries: 0, before: MonotonicTime::from_nanos(0) }
    }

    /// Notes the kernel's count of skipped entries, which was read before `now`.
    pub(super) fn note(&mut self, entries: u64, now: MonotonicTime) {
        if entries != self.entries {
            *self = Self { entries, before: now };
        }
    }

    /// Whether a pair that began at `start`, and ended before the last `note`, is certain.
    pub(super) fn is_ruled_out(&self, start: MonotonicTime) -> bool {
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
        let mut doubt = Doubt::new();
        doubt.note(0, at(100));
        assert!(doubt.is_ruled_out(at(1)));
        doubt.note(3, at(200));
        assert!(!doubt.is_ruled_out(at(150)), "skipped between 100 and 200");
        assert!(!doubt.is_ruled_out(at(200)));
        assert!(doubt.is_ruled_out(at(201)));
        doubt.note(3, at(300));
        assert!(doubt.is_ruled_out(at(201)), "none was skipped since 200");
        doubt.note(4, at(400));
        assert!(!doubt.is_ruled_out(at(201)));
        assert!(!doubt.is_ruled_out(at(399)));
    }
}
