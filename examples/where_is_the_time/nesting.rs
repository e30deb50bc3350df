//! Stages contain each other. Whose is each nanosecond?

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;

use dwell::Name;

/// One run of a stage.
pub struct Run {
    pub stage: Name,
    /// On which it started.
    pub cpu: u32,
    /// Whether it ended there as well.
    pub stayed: bool,
    /// Nanoseconds, as is the end.
    pub start: u64,
    pub end: u64,
}

/// How long each stage took by itself: at any moment the time of a CPU is that of the stage that began last there and
/// hasn't ended.
///
/// For runs within each other that is a run's length without those directly in it. Packets that are received in one batch
/// overlap otherwise; then, too, no moment counts twice.
///
/// Of runs with the same start and end, the inner one comes first in `runs`, as it ended first.
pub fn own_times<'a>(runs: impl Iterator<Item = &'a Run>) -> HashMap<Name, Duration> {
    let mut order: Vec<_> = runs.enumerate().collect();
    order.sort_by_key(|(position, run)| (run.cpu, run.start, Reverse(run.end), Reverse(*position)));
    let mut own = HashMap::new();
    for runs in order.chunk_by(|(_, a), (_, b)| a.cpu == b.cpu) {
        let mut cpu = Cpu { now: 0, open: Vec::new(), own: &mut own };
        for (_, run) in runs {
            cpu.advance(run.start);
            cpu.open.push(run);
        }
        cpu.advance(u64::MAX);
    }
    own
}

struct Cpu<'a> {
    now: u64,
    /// The last one to begin is the last; some before it may have ended meanwhile.
    open: Vec<&'a Run>,
    own: &'a mut HashMap<Name, Duration>,
}

impl Cpu<'_> {
    fn advance(&mut self, until: u64) {
        while let Some(run) = self.open.last() {
            let end = run.end.min(until);
            if end > self.now {
                *self.own.entry(run.stage).or_default() += Duration::from_nanos(end - self.now);
                self.now = end;
            }
            if run.end > until {
                return;
            }
            self.open.pop();
        }
        self.now = until;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs as (stage, CPU, start, end), in the order in which they ended; own times in nanoseconds, by name.
    fn own(runs: &[(&str, u32, u64, u64)]) -> Vec<(String, u128)> {
        let run = |&(stage, cpu, start, end): &(&str, u32, u64, u64)| Run {
            stage: stage.into(),
            cpu,
            stayed: true,
            start,
            end,
        };
        let runs: Vec<_> = runs.iter().map(run).collect();
        let own = own_times(runs.iter());
        let mut own: Vec<_> = own.iter().map(|(stage, time)| (stage.to_string(), time.as_nanos())).collect();
        own.sort();
        own
    }

    fn is(expected: &[(&str, u128)]) -> Vec<(String, u128)> {
        expected.iter().map(|&(stage, time)| (stage.to_owned(), time)).collect()
    }

    /// What is in a run isn't its own, and what is in that isn't either's.
    #[test]
    fn within_each_other() {
        let runs = [("rules", 0, 30, 70), ("hook", 0, 20, 80), ("tcp", 0, 85, 95), ("poll", 0, 0, 100)];
        assert_eq!(own(&runs), is(&[("hook", 20), ("poll", 30), ("rules", 40), ("tcp", 10)]));
    }

    /// A stage in itself (a packet in a packet) counts each moment once.
    #[test]
    fn within_itself() {
        assert_eq!(own(&[("ip", 0, 10, 20), ("ip", 0, 0, 30)]), is(&[("ip", 30)]));
    }

    /// One after the other, with and without a gap.
    #[test]
    fn after_each_other() {
        let runs = [("a", 0, 0, 10), ("b", 0, 10, 30), ("a", 0, 40, 45)];
        assert_eq!(own(&runs), is(&[("a", 15), ("b", 20)]));
    }

    /// What happens at the same time on another CPU takes nothing away.
    #[test]
    fn on_other_cpus() {
        assert_eq!(own(&[("a", 1, 10, 20), ("b", 0, 0, 30)]), is(&[("a", 10), ("b", 30)]));
    }

    /// In a batch each packet begins before the first ends. All of it together is as long as it lasted.
    #[test]
    fn overlapping() {
        let runs = [("ip", 0, 0, 20), ("hook", 0, 22, 24), ("ip", 0, 10, 30), ("poll", 0, 0, 40)];
        assert_eq!(own(&runs), is(&[("hook", 2), ("ip", 28), ("poll", 10)]));
        assert_eq!(own(&[("a", 0, 0, 20), ("b", 0, 10, 30)]), is(&[("a", 10), ("b", 20)]));
    }

    /// Where a clock can't tell two runs apart, the one that ended first is in the other.
    #[test]
    fn of_the_same_length() {
        assert_eq!(own(&[("inner", 0, 5, 9), ("outer", 0, 5, 9)]), is(&[("inner", 4)]));
        assert_eq!(own(&[("inner", 0, 5, 7), ("outer", 0, 5, 9)]), is(&[("inner", 2), ("outer", 2)]));
        assert_eq!(own(&[("inner", 0, 7, 9), ("outer", 0, 5, 9)]), is(&[("inner", 2), ("outer", 2)]));
    }

    /// No time at all.
    #[test]
    fn nothing() {
        assert_eq!(own(&[]), []);
        assert_eq!(own(&[("a", 0, 5, 5)]), []);
    }
}
