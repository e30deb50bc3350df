//! One probe after the other is attached, measured, and taken away.

use std::error::Error;
use std::fmt::Write as _;
use std::thread;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::shared::load::Loopback;

/// Takes a probe away, and says how many calls it has seen, if it knows.
pub type Detach = Box<dyn FnOnce() -> Result<Option<u64>, Box<dyn Error>>>;

/// What the kernel still does when a probe was attached, or another taken away, would be counted. Where the clock counts
/// instructions, it takes no time.
const AFTERMATH: Duration = Duration::from_secs(3);

fn worked() -> Duration {
    // A process's CPU time is never negative.
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}

/// What each probe adds.
pub struct Rows {
    load: Loopback,
    /// Without any, absolute.
    none: f64,
    /// By name; `None` if it couldn't be had.
    added: Vec<(String, Option<f64>)>,
}

impl Rows {
    /// Waits until the machine is quiet, and measures it without a probe.
    pub fn begin(pairs: u32, runs: usize) -> Result<Self, Box<dyn Error>> {
        let mut load = Loopback::start(pairs, runs)?;
        // What a kernel still does after it has booted would be counted.
        thread::sleep(Duration::from_secs(8));
        load.measure()?;
        let none = load.measure()?;
        eprintln!("{:<20} {:>9.1} (spread {:.1})", "none", none.median, none.spread);
        Ok(Self { load, none: none.median, added: Vec::new() })
    }

    /// Measures beside one probe. That it can't be attached is said, and leaves a gap.
    pub fn measure(
        &mut self,
        name: String,
        attach: impl FnOnce() -> Result<Detach, Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        let added = match attach() {
            Ok(detach) => {
                thread::sleep(AFTERMATH);
                let worked = worked();
                let taken = self.load.measure()?;
                // Of the reader, and of whoever gets the events.
                let own = (self::worked() - worked).as_nanos() as f64 / self.load.total() as f64;
                let seen = detach()?;
                let added = taken.median - self.none;
                eprintln!("{name:<20} {added:>+9.1} (spread {:.1}; {own:.1} in this process)", taken.spread);
                self.check(&name, seen);
                Some(added)
            }
            Err(error) => {
                eprintln!("{name:<20} not measured: {error}");
                None
            }
        };
        self.added.push((name, added));
        Ok(())
    }

    /// Measures without a probe again: whatever it differs by was left behind by a probe, and is in later rows.
    pub fn end(mut self) -> Result<(), Box<dyn Error>> {
        thread::sleep(AFTERMATH);
        let none = self.load.measure()?;
        eprintln!("{:<20} {:>9.1} (spread {:.1})", "none, again", none.median, none.spread);
        Ok(())
    }

    /// A probe that didn't see every call wasn't measured doing its work.
    fn check(&self, name: &str, seen: Option<u64>) {
        let total = self.load.total();
        if let Some(seen) = seen.filter(|&seen| seen != total) {
            eprintln!("{name:<20} has seen {seen} calls of {total}");
        }
    }

    /// `{"kernel":...,"none":...,NAME:...}`: what was added, by these names.
    pub fn json(&self, names: impl Iterator<Item = String>) -> String {
        let kernel = rustix::system::uname();
        let mut line = format!("{{\"kernel\":\"{}\",\"none\":{:.1}", kernel.release().to_string_lossy(), self.none);
        for name in names {
            let added = self.added.iter().find(|(row, _)| *row == name).and_then(|(_, added)| *added);
            let added = added.map_or_else(|| "null".to_owned(), |added| format!("{added:.1}"));
            // Writing into a string can't fail.
            let _ = write!(line, ",\"{name}\":{added}");
        }
        line + "}"
    }
}
