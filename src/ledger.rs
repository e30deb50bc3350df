//! The account of every started span.

use std::fmt;
use std::ops::Sub;

use crate::name::Name;

/// What became of every call of every span of a probe.
///
/// Nothing is lost without a number saying so. At rest, when no traced call begins or ends, and so after
/// [`stop`](crate::LatencyProbe::stop), these sums hold for each span:
///
/// - calls of the function, or runs of `from` that have the key = `started` + `missed`
/// - `started` = `completed` + `doubtful` + `abandoned` + `overwritten` + `mismatched` + `expired` + `untracked` +
///   `open` (in a [difference](Ledger::since), `started` + `open_before`)
/// - `emitted` + `below_threshold` + `unsampled` = `completed` + `doubtful`, and `abandoned` if events are made of
///   those
/// - `emitted` = `delivered` + `ring_dropped` + `channel_dropped` + `withheld`
///
/// `started`, `completed` (the histogram's count), what was delivered and what was dropped are counted on their own.
/// `emitted` is, where not all become events; where all do, it is what ended. `below_threshold` and `unsampled` are
/// what is left, so the third sum is a definition. `open` is counted, too, but not where calls are paired by
/// [`Session`](crate::Pairing::Session): there it follows from other numbers, as the shares of `missed` and
/// `missed_exits` do, and the second sum is a definition as well. Otherwise the sums are checks.
/// [`check`](Ledger::check) makes them, but for the first, which takes a count of the calls. While calls are running, a
/// snapshot may be off by the calls that were between two counters.
///
/// ```no_run
/// use std::time::Duration;
/// use dwell::LatencyProbe;
///
/// let probe = LatencyProbe::builder().function("ip_rcv").attach()?;
/// let earlier = probe.ledger();
/// std::thread::sleep(Duration::from_secs(10));
/// // What these ten seconds were like.
/// println!("{}", &probe.ledger() - &earlier);
/// probe.stop().check()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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
    /// In a [difference](Ledger::since): starts from before, whose end hadn't been seen by then. Else 0.
    pub open_before: u64,
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

/// A sum of a ledger that doesn't hold; see [`Ledger::check`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{span}: {total} is {left}, but {parts} are {right}: {account}")]
#[non_exhaustive]
pub struct Imbalance {
    /// The span whose sum it is.
    pub span: Name,
    /// The counter, or counters, on the one side,
    pub total: &'static str,
    /// and on the other.
    pub parts: &'static str,
    /// What the one side comes to,
    pub left: u128,
    /// and the other.
    pub right: u128,
    /// The span's account, as text.
    pub account: String,
}

/// Counters can't overflow this.
fn sum<const N: usize>(counters: [u64; N]) -> u128 {
    counters.into_iter().map(u128::from).sum()
}

impl SpanLedger {
    /// Makes the sums, which must hold at rest: see [`Ledger`].
    ///
    /// # Errors
    ///
    /// The first of them that doesn't hold.
    pub fn check(&self) -> Result<(), Imbalance> {
        let met = sum([self.completed, self.doubtful]);
        let decided = sum([self.emitted, self.below_threshold, self.unsampled]);
        // Whether events are made of what was abandoned, the ledger doesn't say.
        let abandoned = if decided > met { self.abandoned } else { 0 };
        let lost = [self.abandoned, self.overwritten, self.mismatched, self.expired, self.untracked, self.open];
        self.hold(
            ("started + open_before", sum([self.started, self.open_before])),
            (
                "completed + doubtful + abandoned + overwritten + mismatched + expired + untracked + open",
                met + sum(lost),
            ),
        )?;
        self.hold(
            ("emitted + below_threshold + unsampled", decided),
            ("completed + doubtful (+ abandoned)", met + u128::from(abandoned)),
        )?;
        self.hold(
            ("emitted", self.emitted.into()),
            (
                "delivered + ring_dropped + channel_dropped + withheld",
                sum([self.delivered, self.ring_dropped, self.channel_dropped, self.withheld]),
            ),
        )
    }

    fn hold(&self, (total, left): (&'static str, u128), (parts, right): (&'static str, u128)) -> Result<(), Imbalance> {
        if left == right {
            return Ok(());
        }
        Err(Imbalance { span: self.span, total, parts, left, right, account: self.to_string() })
    }

    /// Whether the sums hold, as they must at rest: whether [`check`](Self::check) finds nothing.
    pub fn is_balanced(&self) -> bool {
        self.check().is_ok()
    }

    /// What came after an earlier account of the same span: see [`Ledger::since`].
    pub fn since(&self, earlier: &Self) -> Self {
        // `open` is a state, all others only grow. (Shares that are estimated may shrink a little.)
        macro_rules! difference {
            ($($counter:ident),*) => {
                Self {
                    span: self.span,
                    open: self.open,
                    open_before: earlier.open,
                    $($counter: self.$counter.saturating_sub(earlier.$counter)),*
                }
            };
        }
        difference!(
            started,
            completed,
            emitted,
            below_threshold,
            unsampled,
            delivered,
            ring_dropped,
            channel_dropped,
            withheld,
            abandoned,
            untracked,
            overwritten,
            mismatched,
            doubtful,
            expired,
            unmatched,
            unkeyed,
            unparsed,
            missed,
            missed_exits,
            missed_releases
        )
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
            ("open_before", self.open_before),
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

    /// Makes the sums of every span, which must hold at rest, and so after [`stop`](crate::LatencyProbe::stop).
    ///
    /// # Errors
    ///
    /// The first of them that doesn't hold. While calls are running, that may only be due to those between two counters.
    pub fn check(&self) -> Result<(), Imbalance> {
        self.spans.iter().try_for_each(SpanLedger::check)
    }

    /// Whether the sums hold for every span, as they must at rest, and every record could be read.
    pub fn is_balanced(&self) -> bool {
        self.undecodable == 0 && self.check().is_ok()
    }

    /// What came after an earlier ledger of the same probe, which `&later - &earlier` is, too.
    ///
    /// The sums hold for it as well, with what was open at that time as [`open_before`](SpanLedger::open_before). Spans are
    /// told by their names; one that the earlier ledger doesn't have is taken as a whole.
    pub fn since(&self, earlier: &Self) -> Self {
        let since =
            |account: &SpanLedger| earlier.get(&account.span).map_or_else(|| account.clone(), |e| account.since(e));
        Self {
            spans: self.spans.iter().map(since).collect(),
            undecodable: self.undecodable.saturating_sub(earlier.undecodable),
        }
    }
}

/// [`Ledger::since`].
impl Sub for &Ledger {
    type Output = Ledger;

    fn sub(self, earlier: Self) -> Ledger {
        self.since(earlier)
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
            started: 90,
            open_before: 10,
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
        let bend: [fn(&mut SpanLedger); 17] = [
            |a| a.started += 1,
            |a| a.open_before += 1,
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
        let text = "ip_rcv: started 90 open_before 10 completed 75 emitted 66 below_threshold 13 unsampled 7 delivered 59 \
                    ring_dropped 2 channel_dropped 3 withheld 2 abandoned 6 untracked 4 overwritten 1 mismatched 2 \
                    doubtful 5 expired 4 open 3 unmatched 4 unkeyed 5 unparsed 6 missed_exits 1";
        assert_eq!(account().to_string(), text);
        let ledger = Ledger { spans: vec![account(), account()], undecodable: 1 };
        assert_eq!(ledger.to_string(), format!("{text}\n{text}\nundecodable records: 1"));
    }

    /// What doesn't hold is told with its two sides.
    #[test]
    fn imbalance() {
        let bent = SpanLedger { delivered: 60, ..account() };
        let text = bent.check().unwrap_err().to_string();
        let begins =
            "ip_rcv: emitted is 66, but delivered + ring_dropped + channel_dropped + withheld are 67: ip_rcv: ";
        assert!(text.starts_with(begins), "{text}");
        assert!(Ledger { spans: vec![account(), bent], undecodable: 0 }.check().is_err());
        // No number is too large to be added.
        let absurd = SpanLedger { completed: u64::MAX, doubtful: u64::MAX, ..account() };
        assert_eq!(absurd.check().unwrap_err().right, 2 * u128::from(u64::MAX) + 20);
    }

    /// A difference adds up where both ledgers do, and what was open then is part of it.
    #[test]
    fn difference() {
        let earlier =
            SpanLedger { started: 90, open_before: 0, completed: 65, emitted: 56, delivered: 49, ..account() };
        let later = SpanLedger {
            started: 100,
            open_before: 0,
            completed: 76,
            emitted: 67,
            delivered: 60,
            open: 2,
            ..account()
        };
        let [earlier, later] = [earlier, later].map(|account| Ledger { spans: vec![account], undecodable: 0 });
        assert_eq!((earlier.check(), later.check()), (Ok(()), Ok(())));
        let between = &later - &earlier;
        assert_eq!(between.to_string(), "ip_rcv: started 10 open_before 3 completed 11 delivered 11 open 2");
        assert!(between.is_balanced());
        // A span that wasn't there before, and nothing at all.
        let none = Ledger::default();
        assert_eq!((&later - &none, &none - &later), (later.clone(), none));
    }

    /// Accounts are found by the span's name.
    #[test]
    fn get() {
        let ledger = Ledger { spans: vec![account()], undecodable: 0 };
        assert_eq!(ledger.get("ip_rcv"), Some(&account()));
        assert_eq!(ledger.get("ip_output"), None);
    }
}
