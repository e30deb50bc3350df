//! The account of every started span.

use std::fmt;

use crate::event::SpanName;

/// What became of every call of every span of a probe.
///
/// Nothing is lost without a number saying so. At rest, when no traced call begins or ends, and so after
/// [`stop`](crate::LatencyProbe::stop), these sums hold for each span:
///
/// - calls of the function = `started` + `missed`
/// - `started` = `completed` + `untracked` + `overwritten` + `mismatched` + `open`
/// - `completed` = `delivered` + `ring_dropped` + `channel_dropped`
///
/// `started`, `completed` and `open` are counted independently of each other, so the sums are a check and not a
/// definition; [`SpanLedger::is_balanced`] makes it. While calls are running, a snapshot may be off by the calls that
/// were between two counters.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ledger {
    /// One account for each span, in the order in which they were asked for.
    pub spans: Vec<SpanLedger>,
    /// Records that the ring buffer held but that couldn't be read. Always 0, unless kernel and program disagree
    /// about a record's layout, which would be a bug.
    pub undecodable: u64,
}

/// One span's account; see [`Ledger`] for what adds up.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SpanLedger {
    /// The span.
    pub span: SpanName,
    /// Calls whose entry was seen.
    pub started: u64,
    /// Calls of which entry and exit were seen and matched: the latencies that are known.
    pub completed: u64,
    /// Completed calls whose event was put into the channel.
    pub delivered: u64,
    /// Completed calls whose event found the ring buffer full: the reader thread got too little CPU time.
    pub ring_dropped: u64,
    /// Completed calls whose event found the channel full: the program reads too slowly.
    pub channel_dropped: u64,
    /// Started calls that found no room in the in-flight table, see
    /// [`in_flight`](crate::LatencyProbeBuilder::in_flight). Their exits count as `unmatched`.
    pub untracked: u64,
    /// Started calls whose exit was never seen and whose stack was used by a later call. The kernel skips the exits
    /// of calls in flight when any program attaches to or detaches from the same function.
    pub overwritten: u64,
    /// Started calls that met an exit which was another call's, or may have been: no latency was made of the two.
    ///
    /// (Or, hardly ever, the kernel's clock went backwards in between.)
    ///
    /// It takes a call whose exit was lost, and then one whose entry was (see `missed`). Where entries are missed, every
    /// call is in doubt that lasted while one was, and whose task was switched out in it. **Long calls are more often
    /// in doubt than short ones**: where this number isn't small, the longest latencies are underrepresented.
    pub mismatched: u64,
    /// Started calls whose exit hasn't been seen: running ones, and those whose exit was skipped by the kernel.
    pub open: u64,
    /// Exits without a start: of calls that began before the probe was attached, that were missed, or untracked.
    pub unmatched: u64,
    /// Calls whose entry the kernel kept from the probe. It skips a program that is already running on that CPU, as
    /// happens when a task is preempted or interrupted within it. Linux before 5.12 doesn't do that, and it is 0.
    pub missed: u64,
    /// Exits that the kernel kept from the probe for the same reason. Their calls stay `open`, or become
    /// `overwritten` or `mismatched`.
    pub missed_exits: u64,
}

impl SpanLedger {
    /// Whether the sums hold, as they must at rest.
    pub fn is_balanced(&self) -> bool {
        let ended = [self.completed, self.untracked, self.overwritten, self.mismatched, self.open];
        let handed_over = [self.delivered, self.ring_dropped, self.channel_dropped];
        self.started == ended.iter().sum::<u64>() && self.completed == handed_over.iter().sum::<u64>()
    }

    /// Whether every call became an event: none was missed, dropped, or lost one of its ends.
    pub fn is_lossless(&self) -> bool {
        let lost = [self.untracked, self.overwritten, self.mismatched, self.missed, self.missed_exits];
        self.completed == self.delivered && lost.iter().all(|&count| count == 0)
    }

    /// The counters and their names, in the order in which they explain each other.
    pub fn counters(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("started", self.started),
            ("completed", self.completed),
            ("delivered", self.delivered),
            ("ring_dropped", self.ring_dropped),
            ("channel_dropped", self.channel_dropped),
            ("untracked", self.untracked),
            ("overwritten", self.overwritten),
            ("mismatched", self.mismatched),
            ("open", self.open),
            ("unmatched", self.unmatched),
            ("missed", self.missed),
            ("missed_exits", self.missed_exits),
        ]
        .into_iter()
    }
}

/// `ip_rcv: started 20 completed 20 delivered 20`: a counter that is 0 is left out, but for the first three.
impl fmt::Display for SpanLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.span)?;
        for (n, (name, count)) in self.counters().enumerate() {
            if n < 3 || count > 0 {
                write!(f, " {name} {count}")?;
            }
        }
        Ok(())
    }
}

impl Ledger {
    /// The account of the span with this name.
    pub fn get(&self, span: &str) -> Option<&SpanLedger> {
        self.spans.iter().find(|account| account.span == span)
    }

    /// Whether the sums hold for every span, as they must at rest, and every record could be read.
    pub fn is_balanced(&self) -> bool {
        self.undecodable == 0 && self.spans.iter().all(SpanLedger::is_balanced)
    }
}

/// A line for each span.
impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, account) in self.spans.iter().enumerate() {
            if n > 0 {
                writeln!(f)?;
            }
            write!(f, "{account}")?;
        }
        if self.undecodable > 0 {
            write!(f, "\nundecodable records: {}", self.undecodable)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> SpanLedger {
        SpanLedger {
            span: "ip_rcv".into(),
            started: 100,
            completed: 90,
            delivered: 85,
            ring_dropped: 2,
            channel_dropped: 3,
            untracked: 4,
            overwritten: 1,
            mismatched: 2,
            open: 3,
            unmatched: 4,
            missed: 0,
            missed_exits: 1,
        }
    }

    /// A single count too many or too few is noticed.
    #[test]
    fn balance() {
        assert!(account().is_balanced());
        let bend: [fn(&mut SpanLedger); 9] = [
            |a| a.started += 1,
            |a| a.completed += 1,
            |a| a.delivered += 1,
            |a| a.ring_dropped += 1,
            |a| a.channel_dropped += 1,
            |a| a.untracked += 1,
            |a| a.overwritten += 1,
            |a| a.mismatched += 1,
            |a| a.open += 1,
        ];
        for (n, bend) in bend.iter().enumerate() {
            let mut bent = account();
            bend(&mut bent);
            assert!(!bent.is_balanced(), "change {n} went unnoticed");
        }
        assert!(Ledger { spans: vec![account()], undecodable: 0 }.is_balanced());
        assert!(!Ledger { spans: vec![account()], undecodable: 1 }.is_balanced());
    }

    /// What is zero isn't shown, but for the counters that everybody wants to see.
    #[test]
    fn reads_well() {
        let text = "ip_rcv: started 100 completed 90 delivered 85 ring_dropped 2 channel_dropped 3 untracked 4 \
                    overwritten 1 mismatched 2 open 3 unmatched 4 missed_exits 1";
        assert_eq!(account().to_string(), text);
        let ledger = Ledger { spans: vec![account(), account()], undecodable: 1 };
        assert_eq!(ledger.to_string(), format!("{text}\n{text}\nundecodable records: 1"));
    }

    /// Accounts are found by the span's name.
    #[test]
    fn get() {
        let ledger = Ledger { spans: vec![account()], undecodable: 0 };
        assert_eq!(ledger.get("ip_rcv"), Some(&account()));
        assert_eq!(ledger.get("ip_output"), None);
    }
}
