//! What a span's slowest were: [`Slowest`].

use crate::event::LatencyEvent;

/// The slowest of a span's latencies, see [`LatencyProbe::slowest`](crate::LatencyProbe::slowest).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Slowest {
    /// They, the slowest first: as many as [`keep_slowest`](crate::LatencyProbeBuilder::keep_slowest) says, or all, if
    /// fewer were completed.
    pub events: Vec<LatencyEvent>,
    /// Those that would be among them, but whose start and end may not have belonged together: the kernel has skipped
    /// programs while they ran. If it isn't 0, others, which were less slow than these, may be missing as well.
    pub withheld: u64,
    /// Those that may have been among them, and weren't kept: one was just being kept on their CPU, when what they
    /// were measured in interrupted that, or took its CPU away. 0 on nearly all machines at nearly all times.
    pub unkept: u64,
}

impl Slowest {
    /// Whether these are certainly the slowest of all that were completed.
    pub fn is_exact(&self) -> bool {
        self.withheld == 0 && self.unkept == 0
    }

    /// Of what the CPUs have kept, each with whether its pair is believed, the `count` slowest.
    pub(crate) fn pick(mut kept: Vec<(LatencyEvent, bool)>, count: usize, unkept: u64) -> Self {
        kept.sort_by_key(|(event, _)| (std::cmp::Reverse(event.latency), event.start));
        let mut slowest = Self { unkept, ..Self::default() };
        for (event, is_believed) in kept {
            if slowest.events.len() == count {
                break;
            }
            if is_believed {
                slowest.events.push(event);
            } else {
                slowest.withheld += 1;
            }
        }
        slowest
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::event::MonotonicTime;

    fn event(start: u64, latency: u64) -> LatencyEvent {
        LatencyEvent {
            span: "ip_rcv".into(),
            ended_at: "ip_rcv".into(),
            outcome: crate::event::Outcome::Completed,
            key: crate::event::EventKey::Call,
            start: MonotonicTime::from_nanos(start),
            latency: Duration::from_nanos(latency),
            pid: 1,
            tid: 1,
            comm: crate::event::Comm::from_bytes([0; 16]),
            cpu_start: 0,
            cpu_end: 0,
            ret: None,
            skb: None,
            identity: None,
            story: None,
        }
    }

    fn picked(kept: &[(u64, u64, bool)], count: usize) -> (Vec<(u64, u64)>, u64) {
        let kept = kept.iter().map(|&(start, latency, is_believed)| (event(start, latency), is_believed)).collect();
        let slowest = Slowest::pick(kept, count, 0);
        assert_eq!(slowest.is_exact(), slowest.withheld == 0);
        let events = slowest.events.iter();
        let events = events.map(|event| (event.start.as_nanos(), event.latency.as_nanos() as u64));
        (events.collect(), slowest.withheld)
    }

    /// The slowest of all CPUs come first, and of equal ones those that started first.
    #[test]
    fn in_order() {
        let kept = [(1, 5, true), (4, 9, true), (2, 7, true), (3, 9, true)];
        assert_eq!(picked(&kept, 3), (vec![(3, 9), (4, 9), (2, 7)], 0));
        assert_eq!(picked(&kept, 64).0.len(), 4);
        assert_eq!(picked(&[], 64), (vec![], 0));
    }

    /// What is in doubt gives its place to the next, and is counted where it would have had one.
    #[test]
    fn doubts() {
        let kept = [(1, 5, true), (2, 9, false), (3, 7, true), (4, 4, false)];
        assert_eq!(picked(&kept, 1), (vec![(3, 7)], 1));
        assert_eq!(picked(&kept, 2), (vec![(3, 7), (1, 5)], 1));
        assert_eq!(picked(&kept, 3), (vec![(3, 7), (1, 5)], 2));
        assert!(!Slowest { unkept: 1, ..Slowest::default() }.is_exact());
    }
}
