//! The account of every started span.

use std::fmt;

use crate::name::Name;

/// What became of every call of every span of a probe.
///
/// Nothing is lost without a number saying so. At rest, when no traced call begins or ends, and so after
/// [`stop`](crate::LatencyProbe::stop), these sums hold for each span:
///
/// - calls of the function, or runs of `from` that have the key = `started` + `missed`
/// - `started` = `completed` + `doubtful` + `abandoned` + `overwritten` + `mismatched` + `expired` + `untracked` +
///   `open`
/// - `emitted` + `below_threshold` + `unsampled` = `completed` + `doubtful`, and `abandoned` if events are made of
///   those
/// - `emitted` = `delivered` + `ring_dropped` + `channel_dropped` + `withheld`
///
/// `started`, `completed` (the histogram's count), what was delivered and what was dropped are counted on their own.
/// `emitted` is, where not all become events; where all do, it is what ended. `below_threshold` and `unsampled` are
/// what is left, so the third sum is a definition. `open` is counted, too, but not where calls are paired by
/// [`Session`](crate::Pairing::Session): there it follows from other numbers, as the shares of `missed` and
/// `missed_exits` do, and the second sum is a definition as well. Otherwise the sums are checks.
/// [`SpanLedger::is_balanced`] makes them, but for the first, which takes a count of the calls. While calls are
/// running, a snapshot may be off by the calls that were between two counters.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ledger {
    /// One account for each span, in the order in which they were asked for.
    pub spans: Vec<SpanLedger>,
    /// Records that the rings held but that couldn't be read. Always 0, unless kernel and program disagree
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
    /// Those of which start and end were seen and matched: the latencies that are known. They are in the histogram.
    pub completed: u64,
    /// Those of which an event was made, or would have been but for want of room.
    pub emitted: u64,
    /// Those that were too short to become events, see [`Events::OverThreshold`](crate::Events::OverThreshold).
    pub below_threshold: u64,
    /// Those that weren't picked to become events, see [`Events::OneIn`](crate::Events::OneIn); all, where none are wanted.
    pub unsampled: u64,
    /// Events that were handed over: put into the channel or into a batch, or given to the callback.
    pub delivered: u64,
    /// Events that found the ring full: the reader thread got too little CPU time, or the callback takes too long.
    pub ring_dropped: u64,
    /// Events that weren't taken: the channel is full, or the batches are, since the program reads too slowly; or the
    /// callback has panicked.
    pub channel_dropped: u64,
    /// Events that weren't handed over, since their start and end may not have belonged together. For events this is
    /// decided one by one, as they are read; for the histogram it is decided later, for many pairs at once. So this
    /// number and `doubtful` may differ.
    pub withheld: u64,
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
    /// Starts that met an end which was another's, or may have been: no latency was made of the two. Where only tracepoints
    /// can be had, also packets whose data moved on the way. (Or, hardly ever, the kernel's clock went backwards.)
    pub mismatched: u64,
    /// Pairs that were taken out of the histogram again, since they may not have belonged together. It is decided when the
    /// histogram or the ledger is read: of all pairs since the last time that aren't certain by themselves.
    ///
    /// Between hooks: where one of the span's programs was skipped since the start (see `missed`), but for packets that
    /// pass two hooks where they go.
    ///
    /// For a wrong pair of calls two things must be lost: the exit of one call, and then the entry of a later one (see
    /// `missed`). So where entries are missed, calls may be in doubt, mostly those during which their thread was
    /// switched out. **Long calls are more often in doubt than short ones**: where this number isn't small, the longest
    /// latencies are underrepresented. With [`Pairing::Session`](crate::Pairing::Session) nothing is ever in doubt.
    pub doubtful: u64,
    /// Starts that got older than [`max_age`](crate::Span::max_age), whether they met their end or not.
    pub expired: u64,
    /// Starts whose end hasn't been seen: running calls, packets on their way, and those whose end was skipped by the
    /// kernel.
    pub open: u64,
    /// Ends without a start: of what was missed, or untracked; between hooks also of what began before the probe was
    /// attached, and of packets that came to `to` another way. Not counted for stages that measure some of a function's
    /// calls only.
    pub unmatched: u64,
    /// Runs of `from` or `to` at which there was no key: a NULL pointer, a packet that isn't IP, a socket without a peer.
    pub unkeyed: u64,
    /// Starts that a [`filter`](crate::LatencyProbeBuilder::filter) left out because it couldn't be told whether they pass:
    /// the packet couldn't be read, or hasn't got its headers yet. What is known not to pass isn't counted.
    pub unparsed: u64,
    /// Starts that the kernel kept from the probe. It skips a program that is already running on that CPU, as
    /// happens when a task is preempted or interrupted within it. Linux before 5.12 doesn't do that, and it is 0.
    ///
    /// With [`Pairing::Session`](crate::Pairing::Session) the kernel counts these and `missed_exits` together. Which
    /// were which is only sure at rest; while calls are running it is an estimate.
    pub missed: u64,
    /// Ends that the kernel kept from the probe for the same reason. Their starts stay `open`, or become `overwritten`,
    /// `mismatched` or `expired`. With [`Pairing::Session`](crate::Pairing::Session) an estimate, as `missed` is.
    pub missed_exits: u64,
    /// Frees of packets, and of sockets and threads, that the kernel kept from the probe for the same reason, in use by
    /// a span or not.
    pub missed_releases: u64,
}

impl SpanLedger {
    /// Whether the sums hold, as they must at rest.
    pub fn is_balanced(&self) -> bool {
        let early = [self.doubtful, self.abandoned, self.overwritten, self.mismatched, self.expired, self.untracked];
        let ended = self.completed + early.iter().sum::<u64>() + self.open;
        let handed_over = [self.delivered, self.ring_dropped, self.channel_dropped, self.withheld];
        let wanted = self.emitted + self.below_threshold + self.unsampled;
        let abandoned = wanted.checked_sub(self.completed + self.doubtful);
        let decided = abandoned.is_some_and(|abandoned| abandoned == 0 || abandoned == self.abandoned);
        self.started == ended && decided && self.emitted == handed_over.iter().sum::<u64>()
    }

    /// Whether every start that met its end is a known latency, every event that was wanted was delivered, and none was
    /// missed, dropped, or lost its end.
    pub fn is_lossless(&self) -> bool {
        let lost = [self.untracked, self.overwritten, self.mismatched, self.doubtful, self.expired];
        let missed = [self.missed, self.missed_exits];
        self.emitted == self.delivered && lost.iter().chain(&missed).all(|&count| count == 0)
    }

    /// The counters and their names, in the order in which they explain each other.
    pub fn counters(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("started", self.started),
            ("completed", self.completed),
            ("emitted", self.emitted),
            ("below_threshold", self.below_threshold),
            ("unsampled", self.unsampled),
            ("delivered", self.delivered),
            ("ring_dropped", self.ring_dropped),
            ("channel_dropped", self.channel_dropped),
            ("withheld", self.withheld),
            ("abandoned", self.abandoned),
            ("untracked", self.untracked),
            ("overwritten", self.overwritten),
            ("mismatched", self.mismatched),
            ("doubtful", self.doubtful),
            ("expired", self.expired),
            ("open", self.open),
            ("unmatched", self.unmatched),
            ("unkeyed", self.unkeyed),
            ("unparsed", self.unparsed),
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
            completed: 75,
            emitted: 66,
            below_threshold: 13,
            unsampled: 7,
            delivered: 59,
            ring_dropped: 2,
            channel_dropped: 3,
            withheld: 2,
            abandoned: 6,
            untracked: 4,
            overwritten: 1,
            mismatched: 2,
            doubtful: 5,
            expired: 4,
            open: 3,
            unmatched: 4,
            unkeyed: 5,
            unparsed: 6,
            missed: 0,
            missed_exits: 1,
            missed_releases: 0,
        }
    }

    /// A single count too many or too few is noticed.
    #[test]
    fn balance() {
        assert!(account().is_balanced());
        let bend: [fn(&mut SpanLedger); 16] = [
            |a| a.started += 1,
            |a| a.completed += 1,
            |a| a.emitted += 1,
            |a| a.below_threshold += 1,
            |a| a.unsampled += 1,
            |a| a.withheld += 1,
            |a| a.doubtful += 1,
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
        let text = "ip_rcv: started 100 completed 75 emitted 66 below_threshold 13 unsampled 7 delivered 59 \
                    ring_dropped 2 channel_dropped 3 withheld 2 abandoned 6 untracked 4 overwritten 1 mismatched 2 \
                    doubtful 5 expired 4 open 3 unmatched 4 unkeyed 5 unparsed 6 missed_exits 1";
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
