//! What `where_is_the_time` prints.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::time::Duration;

use dwell::{Ledger, Name, Stage};

use crate::nesting::{Run, own_times};

/// Here packets and connections wait, and no CPU works on them meanwhile.
pub const WAITING: [Stage; 3] = [Stage::Qdisc, Stage::SocketQueue, Stage::Accept];

/// What was seen of a stage.
struct Row {
    stage: Stage,
    /// Sorted, and one at least.
    latencies: Vec<Duration>,
    /// What its place is decided by.
    weight: Duration,
}

impl Row {
    fn total(&self) -> Duration {
        self.latencies.iter().sum()
    }

    /// The shortest latency that so many of a hundred don't exceed.
    fn percentile(&self, percent: usize) -> Duration {
        let rank = (self.latencies.len() * percent).div_ceil(100).max(1);
        self.latencies[rank - 1]
    }
}

pub fn print(out: &mut impl Write, runs: &[Run], ledger: &Ledger) -> io::Result<()> {
    let mut latencies: HashMap<&Name, Vec<Duration>> = HashMap::new();
    for run in runs {
        latencies.entry(&run.stage).or_default().push(Duration::from_nanos(run.end - run.start));
    }
    let is_waiting = |run: &Run| WAITING.iter().any(|stage| run.stage == stage.name());
    let own = own_times(runs.iter().filter(|run| run.stayed && !is_waiting(run)));

    let (mut working, mut waiting, mut quiet) = (Vec::new(), Vec::new(), Vec::new());
    for account in &ledger.spans {
        let Ok(stage) = account.span.parse::<Stage>() else { continue };
        let Some(mut latencies) = latencies.remove(&account.span) else {
            quiet.push(stage.name());
            continue;
        };
        latencies.sort_unstable();
        let mut row = Row { stage, latencies, weight: own.get(&account.span).copied().unwrap_or_default() };
        if WAITING.contains(&stage) {
            row.weight = row.total();
            waiting.push(row);
        } else {
            working.push(row);
        }
    }

    working.sort_by_key(|row| Reverse(row.weight));
    waiting.sort_by_key(|row| Reverse(row.weight));
    match working.first() {
        Some(Row { stage, weight, .. }) => {
            let all = working.iter().map(|row| row.weight).sum();
            writeln!(out, "{stage} takes most: {} of {all:.1?} ({})\n", percent(*weight, all), stage.description())?;
            table(out, "OWN", &working)?;
            writeln!(out, "\nOWN is without the stages within a stage; TOTAL and what follows is with them.")?;
        }
        None => writeln!(out, "No stage was seen at work.")?,
    }
    if !waiting.is_empty() {
        writeln!(out, "\nWaited, while no CPU worked on it:\n")?;
        table(out, "WAITED", &waiting)?;
    }
    if !quiet.is_empty() {
        writeln!(out, "\nNothing came through {}.", quiet.join(", "))?;
    }
    let incomplete: Vec<_> = ledger.spans.iter().filter(|account| !account.is_lossless()).collect();
    if !incomplete.is_empty() {
        writeln!(out, "\nNot everything could be measured:")?;
    }
    incomplete.iter().try_for_each(|account| writeln!(out, "  {account}"))
}

fn table(out: &mut impl Write, weight: &str, rows: &[Row]) -> io::Result<()> {
    let all = rows.iter().map(|row| row.weight).sum();
    writeln!(
        out,
        "{:<22} {:>8} {weight:>9} {:>6} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "STAGE", "EVENTS", "SHARE", "TOTAL", "MEAN", "P50", "P99", "MAX"
    )?;
    for row in rows {
        let count = row.latencies.len();
        let mean = row.total() / count as u32;
        write!(out, "{:<22} {count:>8} {:>9} {:>6}", row.stage, short(row.weight), percent(row.weight, all))?;
        for time in [row.total(), mean, row.percentile(50), row.percentile(99), row.percentile(100)] {
            write!(out, " {:>9}", short(time))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn short(time: Duration) -> String {
    format!("{time:.1?}")
}

fn percent(part: Duration, all: Duration) -> String {
    format!("{:.1}%", part.as_secs_f64() / all.as_secs_f64().max(f64::MIN_POSITIVE) * 100.0)
}

/// Stages that couldn't be measured, those with the same reason together.
pub fn failures(out: &mut impl Write, failures: &[(String, String)]) -> io::Result<()> {
    let mut by_reason: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (stage, reason) in failures {
        by_reason.entry(reason).or_default().push(stage);
    }
    if !by_reason.is_empty() {
        writeln!(out, "\nCan't be measured here:")?;
    }
    by_reason.iter().try_for_each(|(reason, stages)| writeln!(out, "  {}: {reason}", stages.join(", ")))
}
