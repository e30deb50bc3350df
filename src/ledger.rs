//! The account of every started span.

use std::fmt;

use crate::event::Name;

/// What became of every call of every span of a probe.
///
/// Nothing is lost without a number saying so. At rest, when no traced call begins or ends, and so after
/// [`stop`](crate::LatencyProbe::stop), these sums hold for each span:
///
/// - calls of the function, or runs of `from` that have the key = `started` + `missed`
/// - `started` = `completed` + `abandoned` + `overwritten` + `mismatched` + `expired` + `untracked` + `open`
/// - `emitted` = `completed`, and `abandoned` if events are made of those
/// - `emitted` = `delivered` + `ring_dropped` + `channel_dropped`
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
    pub span: Name,
    /// Calls whose entry was seen; runs of `from` that had the key.
    pub started: u64,
    /// Those of which start and end were seen and matched: the latencies that are known.
    pub completed: u64,
    /// Those of which an event was to be made.
    pub emitted: u64,
    /// Events that were put into the channel.
    pub delivered: u64,
    /// Events that found the ring buffer full: the reader thread got too little CPU time.
    pub ring_dropped: u64,
    /// Events that found the channel full: the program reads too slowly.
    pub channel_dropped: u64,
    /// Starts whose packet, socket or thread went before the end, see [`Outcome`](crate::Outcome). Calls never do.
    pub abandoned: u64,
    /// Starts that found no room in the in-flight table, see [`in_flight`](crate::LatencyProbeBuilder::in_flight). Their
    /// ends count as `unmatched`.
    pub untracked: u64,
    /// Starts that gave way to a later one, or, with [`Restart::KeepFirst`](crate::Restart::KeepFirst), to an earlier one.
    ///
    /// Of calls: those whose exit was never seen and whose stack was used by a later call. The kernel skips the exits of
    /// calls in flight when any program attaches to or detaches from the same function.
    pub overwritten: u64,
    /// Starts that met an end which was another's, or may have been: no latency was made of the two.
    ///
    /// (Or, hardly ever, the kernel's clock went backwards in between.)
    ///
    /// Between hooks: where one of the span's programs was skipped since the start (see `missed`), but for packets that
    /// pass two hooks where they go; and where only tracepoints can be had, packets whose data moved on the way.
    ///
    /// For calls it takes one whose exit was lost, and then one whose entry was (see `missed`). Where entries are missed,
    /// every call is in doubt that lasted while one was, and whose task was switched out in it. **Long calls are more
    /// often in doubt than short ones**: where this number isn't small, the longest latencies are underrepresented.
    pub mismatched: u64,
    /// Starts that got older than [`max_age`](crate::Span::max_age), whether they met their end or not.
    pub expired: u64,
    /// Starts whose end hasn't been seen: running calls, packets on their way, and those whose end was skipped by the
    /// kernel.
    pub open: u64,
    /// Ends without a start: of what began before the probe was attached, that was missed, or untracked; of packets that
    /// came to `to` another way. Not counted for stages that measure some of a function's calls only.
    pub unmatched: u64,
    /// Runs of `from` or `to` at which there was no key: a NULL pointer, a packet that isn't IP, a socket without a peer.
    pub unkeyed: u64,
    /// Starts that the kernel kept from the probe. It skips a program that is already running on that CPU, as
    /// happens when a task is preempted or interrupted within it. Linux before 5.12 doesn't do that, and it is 0.
    pub missed: u64,
    /// Ends that the kernel kept from the probe for the same reason. Their starts stay `open`, or become `overwritten`,
    /// `mismatched` or `expired`.
    pub missed_exits: u64,
    /// Frees of packets, and of sockets and threads, that the kernel kept from the probe for the same reason, in use by
    /// a span or not.
    pub missed_releases: u64,
}

impl SpanLedger {
    /// Whether the sums hold, as they must at rest.
    pub fn is_balanced(&self) -> bool {
        let early = [self.abandoned, self.overwritten, self.mismatched, self.expired, self.untracked];
        let ended = self.completed + early.iter().sum::<u64>() + self.open;
        let handed_over = [self.delivered, self.ring_dropped, self.channel_dropped];
        self.started == ended && self.emitted == handed_over.iter().sum::<u64>()
    }

    /// Whether every start that met its end became an event, and none was missed, dropped, or lost its end.
    pub fn is_lossless(&self) -> bool {
        let lost = [self.untracked, self.overwritten, self.mismatched, self.expired, self.missed, self.missed_exits];
        self.emitted == self.delivered && lost.iter().all(|&count| count == 0)
    }

    /// The counters and their names, in the order in which they explain each other.
    pub fn counters(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("started", self.started),
            ("completed", self.completed),
            ("emitted", self.emitted),
            ("delivered", self.delivered),
            ("ring_dropped", self.ring_dropped),
            ("channel_dropped", self.channel_dropped),
            ("abandoned", self.abandoned),
            ("untracked", self.untracked),
            ("overwritten", self.overwritten),
            ("mismatched", self.mismatched),
            ("expired", self.expired),
            ("open", self.open),
            ("unmatched", self.unmatched),
            ("unkeyed", self.unkeyed),
            ("missed", self.missed),
            ("missed_exits", self.missed_exits),
            ("missed_releases", self.missed_releases),
        ]
        .into_iter()
    }
}

/// `ip_rcv: started 20 completed 20 delivered 20`: a counter that is 0 is left out, but for the first three.
impl fmt::Display for SpanLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.span)?;
        for (name, count) in self.counters() {
            let shown = match name {
                "started" | "completed" | "delivered" => true,
                // Mostly the same number once more.
                "emitted" => count != self.completed,
                _ => count > 0,
            };
            if shown {
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
            completed: 80,
            emitted: 86,
            delivered: 81,
            ring_dropped: 2,
            channel_dropped: 3,
            abandoned: 6,
            untracked: 4,
            overwritten: 1,
            mismatched: 2,
            expired: 4,
            open: 3,
            unmatched: 4,
            unkeyed: 5,
            missed: 0,
            missed_exits: 1,
            missed_releases: 0,
        }
    }

    /// A single count too many or too few is noticed.
    #[test]
    fn balance() {
        assert!(account().is_balanced());
        let bend: [fn(&mut SpanLedger); 12] = [
            |a| a.started += 1,
            |a| a.completed += 1,
            |a| a.emitted += 1,
            |a| a.abandoned += 1,
            |a| a.expired += 1,
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
        let text = "ip_rcv: started 100 completed 80 emitted 86 delivered 81 ring_dropped 2 channel_dropped 3 abandoned 6 \
                    untracked 4 overwritten 1 mismatched 2 expired 4 open 3 unmatched 4 unkeyed 5 missed_exits 1";
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
