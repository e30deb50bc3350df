//! Rounds of random probes under random traffic, after each of which the ledgers must add up, exactly. For whoever has
//! `mod mix`: the tests of the balance, in guests and natively, and the soak.

mod load;
mod probes;
mod reading;

use std::error::Error;
use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

use dwell::{Events, LatencyProbe, Ledger, Support};
use fastrand::Rng;

use load::Load;
use probes::Wish;
use reading::{Reading, Received};

/// What the machine allows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Hooks {
    /// Functions and tracepoints.
    All,
    /// Tracepoints only.
    Tracepoints,
}

impl Hooks {
    /// What this machine allows; else why it allows nothing.
    pub fn here() -> Result<Self, Support> {
        let support = Support::probe();
        match (support.can_trace_functions(), support.can_trace_packets()) {
            (true, _) => Ok(Self::All),
            (_, true) => Ok(Self::Tracepoints),
            _ => Err(support),
        }
    }
}

/// What rounds have come to, for who wants to see that they aren't empty.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Sums {
    pub probes: u64,
    pub spans: u64,
    pub started: u64,
    pub completed: u64,
    pub delivered: u64,
    /// Of events, anywhere.
    pub dropped: u64,
    /// Of starts, in any way.
    pub lost: u64,
    pub missed: u64,
}

impl Sums {
    fn add(&mut self, ledger: &Ledger) {
        self.probes += 1;
        for account in &ledger.spans {
            self.spans += 1;
            self.started += account.started;
            self.completed += account.completed;
            self.delivered += account.delivered;
            self.dropped += account.ring_dropped + account.channel_dropped + account.withheld;
            self.lost += account.untracked + account.overwritten + account.mismatched + account.expired;
            self.lost += account.doubtful + account.abandoned;
            self.missed += account.missed + account.missed_exits;
        }
    }
}

impl fmt::Display for Sums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { probes, spans, started, completed, delivered, dropped, lost, missed } = self;
        write!(
            f,
            "{probes} probes, {spans} spans, {started} started, {completed} completed, {delivered} delivered, \
             {dropped} dropped, {lost} lost, {missed} missed"
        )
    }
}

/// Rounds for so long, three at least, and what they came to. Repeatable, as far as traffic is: `seed` decides what is asked
/// for.
pub fn rounds(seed: u64, time: Duration, hooks: Hooks) -> Sums {
    let mut rng = Rng::with_seed(seed);
    let (mut sums, mut rounds, begin) = (Sums::default(), 0, Instant::now());
    while begin.elapsed() < time || rounds < 3 {
        rounds += 1;
        if let Err(complaint) = round(&mut rng, hooks, &mut sums) {
            panic!("seed {seed}, round {rounds}: {complaint}");
        }
    }
    println!("seed {seed}, {rounds} rounds: {sums}");
    // That something has been tested at all.
    assert!(sums.completed > 0 && sums.delivered > 0, "{sums}");
    sums
}

/// One round: some traffic, and probes that come and go under it, the last of which sees the traffic end. Beside them, from before the traffic to after it, one that counts calls. What doesn't add up is the error, with all
/// that it takes to see why.
fn round(rng: &mut Rng, hooks: Hooks, sums: &mut Sums) -> Result<(), Box<dyn Error>> {
    let control = (hooks == Hooks::All && rng.u8(0..3) == 0).then(control).transpose()?;
    // One whose life is longer than the traffic sees the same calls as the control.
    let first = control.is_some().then(|| Life::begin(rng, hooks)).transpose()?.flatten();
    let load = Load::start(rng);
    for _ in 0..rng.u8(0..=1) {
        if let Some(life) = Life::begin(rng, hooks)? {
            life.go_on(rng)?;
            // Under load.
            sums.add(&life.end()?);
        }
    }
    let last = Life::begin(rng, hooks)?;
    for life in first.iter().chain(&last) {
        life.go_on(rng)?;
    }
    load.stop();
    // Attaching takes longer than anything else, so each sees more than one kind of traffic.
    for _ in 0..3 {
        let load = Load::start(rng);
        for life in first.iter().chain(&last) {
            life.go_on(rng)?;
        }
        load.stop();
        for life in first.iter().chain(&last) {
            life.rest()?;
        }
    }
    if let Some(last) = last {
        sums.add(&last.end_at_rest()?);
    }
    if let Some((control, first)) = control.zip(first) {
        let unfiltered = !first.wish.is_filtered();
        let wish = first.wish.to_string();
        let ledger = first.end_at_rest()?;
        sums.add(&ledger);
        let control = control.stop();
        control.check()?;
        for calls in control.spans.iter().filter(|_| unfiltered) {
            let Some(account) = ledger.get(&calls.span) else { continue };
            if account.started + account.missed != calls.started + calls.missed {
                return Err(format!("{wish}: not the same calls: {calls} | {account}").into());
            }
        }
    }
    Ok(())
}

/// A probe that sees all calls of the functions that others may measure.
fn control() -> Result<LatencyProbe, dwell::Error> {
    let functions = probes::FUNCTIONS.iter();
    functions.fold(LatencyProbe::builder(), |builder, name| builder.function(*name)).events(Events::None).attach()
}

/// A probe, from its attaching on.
struct Life {
    wish: Wish,
    probe: LatencyProbe,
    reading: Reading,
}

impl Life {
    /// `None` where this kernel can't have such a probe, which has a cause.
    fn begin(rng: &mut Rng, hooks: Hooks) -> Result<Option<Self>, Box<dyn Error>> {
        let wish = Wish::random(rng, hooks);
        match reading::attach(&wish, rng) {
            Ok((probe, reading)) => Ok(Some(Self { wish, probe, reading })),
            Err(error) if probes::is_expected(error.kind()) => Ok(None),
            Err(error) => Err(format!("{wish}: {error}").into()),
        }
    }

    /// Some time, in which it is asked this and that.
    fn go_on(&self, rng: &mut Rng) -> Result<(), Box<dyn Error>> {
        for _ in 0..rng.u8(1..=3) {
            thread::sleep(Duration::from_millis(rng.u64(5..=60)));
            match rng.u8(0..4) {
                0 => drop(self.probe.ledger()),
                1 => {
                    for span in self.probe.spans() {
                        self.probe.histogram(&span.name)?;
                    }
                }
                2 if self.wish.keeps_slowest() => {
                    for span in self.probe.spans() {
                        self.probe.slowest(&span.name)?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// At rest the sums hold, as soon as the reader has read what there is.
    fn rest(&self) -> Result<(), Box<dyn Error>> {
        let end = Instant::now() + Duration::from_secs(10);
        while let Err(imbalance) = self.probe.ledger().check() {
            // Which it can't, as long as somebody else doesn't read.
            if self.reading.is_slow() && imbalance.total == "emitted" {
                return Ok(());
            }
            if Instant::now() > end {
                return Err(format!("{}: at rest: {imbalance}", self.wish).into());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Stops it, whatever is going on.
    fn end(self) -> Result<Ledger, Box<dyn Error>> {
        let Self { wish, probe, reading } = self;
        let ledger = probe.stop();
        let received = reading.finish();
        check(&ledger, &received).map_err(|complaint| format!("{wish}: {complaint}"))?;
        Ok(ledger)
    }

    /// The same once the traffic has ended: then it also adds up before, and from one time to the next.
    fn end_at_rest(self) -> Result<Ledger, Box<dyn Error>> {
        let earlier = self.probe.ledger();
        let histograms: Vec<_> =
            self.probe.spans().iter().map(|span| self.probe.histogram(&span.name)).collect::<Result<_, _>>()?;
        let wish = self.wish.to_string();
        let ledger = self.end()?;
        let between = &ledger - &earlier;
        for ((histogram, account), between) in histograms.iter().zip(&ledger.spans).zip(&between.spans) {
            // The machine itself may send a packet at any time.
            let since = between.completed;
            if !(account.completed.saturating_sub(since)..=account.completed).contains(&histogram.count()) {
                return Err(format!("{wish}: a histogram of {}: {account}", histogram.count()).into());
            }
        }
        Ok(ledger)
    }
}

fn check(ledger: &Ledger, received: &Received) -> Result<(), Box<dyn Error>> {
    ledger.check()?;
    if ledger.undecodable > 0 {
        return Err(format!("{} undecodable records: {ledger}", ledger.undecodable).into());
    }
    for account in &ledger.spans {
        let events = received.of(&account.span);
        if events != account.delivered {
            return Err(format!("{events} events were received: {account}").into());
        }
    }
    Ok(())
}
