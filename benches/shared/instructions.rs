//! What the benchmarks that count instructions have in common: their arguments, and one row after the other.

use std::error::Error;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use crate::shared::peer::{self, Peer, Sign};
use crate::shared::programs;
use crate::shared::rows::{Detach, Rows};

#[derive(Args)]
pub struct Common {
    /// The compiled `benches/bpf/floor.bpf.c`
    #[arg(long, required_unless_present = "table")]
    objects: Option<PathBuf>,
    /// Datagrams of a run
    #[arg(long, default_value_t = 20_000)]
    pairs: u32,
    /// Runs, of which the median counts; one more before them doesn't
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Where `scripts/peers` has put bpftrace
    #[arg(long)]
    bpftrace: Option<PathBuf>,
    /// Measure nothing: make a table of the lines on standard input
    #[arg(long)]
    pub table: bool,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

impl Common {
    /// Programs that do what any probe must do.
    pub fn floor(&self, names: [&str; 2]) -> Result<Detach, Box<dyn Error>> {
        let objects = self.objects.as_deref().ok_or("no object file is given")?;
        let links = programs::attach(objects, &names)?;
        Ok(Box::new(move || {
            drop(links);
            Ok(None)
        }))
    }

    pub fn bpftrace(&self, script: &str) -> Result<Detach, Box<dyn Error>> {
        let peer = Peer::start(tool(self.bpftrace.as_deref())?, &["-f", "json", "-e", script], Sign::Links)?;
        Ok(Box::new(|| Ok(Some(peer::bpftrace_calls(&peer.stop()?)))))
    }

    /// Measures the rows that are asked for, or all that the table has, and prints a line of JSON with those.
    pub fn measure<R: ValueEnum>(
        &self,
        asked: &[R],
        of_table: &[R],
        attach: impl Fn(&R) -> Result<Detach, Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        let mut rows = Rows::begin(self.pairs, self.runs)?;
        for row in if asked.is_empty() { of_table } else { asked } {
            rows.measure(name(row), || attach(row))?;
        }
        println!("{}", rows.json(of_table.iter().map(name)));
        rows.end()
    }
}

/// Where a tool is, if there is one.
pub fn tool(path: Option<&Path>) -> Result<&Path, Box<dyn Error>> {
    Ok(path.ok_or("the tool could not be had")?)
}

/// As it is given on the command line.
fn name(row: &impl ValueEnum) -> String {
    row.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}
