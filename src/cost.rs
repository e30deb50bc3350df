//! What a probe itself costs: [`Cost`], [`ProgramStatistics`].

use std::fmt;
use std::os::fd::OwnedFd;
use std::time::Duration;

use crate::driver;
use crate::error::Error;
use crate::name::Name;

/// What the kernel says that a probe's programs took, as long as it counted; see
/// [`LatencyProbe::cost`](crate::LatencyProbe::cost).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cost {
    /// One for each span, in the order in which they were asked for.
    pub spans: Vec<SpanCost>,
}

/// What a span's programs took.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SpanCost {
    /// The span.
    pub span: Name,
    /// Those at its starts. Of [sessions](crate::Pairing::Session), which are one program, both ends: two runs a call.
    pub starts: ProgramCost,
    /// Those at its ends.
    pub ends: ProgramCost,
    /// Those at which packets, sockets and threads go, in use by the span or not.
    pub releases: ProgramCost,
}

/// Runs of programs, and what they took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProgramCost {
    /// How often they ran.
    pub runs: u64,
    /// How long that took together. Not in it: the trampoline that leads to a program, and the kernel's own counting,
    /// which costs more than many a program.
    pub time: Duration,
}

impl ProgramCost {
    /// Of a run, on average. `None` if there was none.
    pub fn mean(&self) -> Option<Duration> {
        let nanos = self.time.as_nanos().checked_div(u128::from(self.runs))?;
        Some(Duration::from_nanos(nanos as u64))
    }
}

/// `ip_rcv: starts 1000 runs of 45ns ends 1000 runs of 62ns`: what didn't run is left out.
impl fmt::Display for SpanCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.span)?;
        for (name, cost) in [("starts", self.starts), ("ends", self.ends), ("releases", self.releases)] {
            if let Some(mean) = cost.mean() {
                write!(f, " {name} {} runs of {mean:?}", cost.runs)?;
            }
        }
        Ok(())
    }
}

/// A line for each span.
impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, span) in self.spans.iter().enumerate() {
            write!(f, "{}{span}", if n == 0 { "" } else { "\n" })?;
        }
        Ok(())
    }
}

/// Has the kernel count runs and times of all BPF programs on the machine, as long as it lives.
///
/// That isn't free: each run of each program then costs two more readings of a clock, some tens of nanoseconds, which are
/// in every latency that is measured meanwhile. So it is for finding out, not for leaving on. Whoever turns the same on by
/// the sysctl `kernel.bpf_stats_enabled` needs nothing of this.
///
/// ```no_run
/// use dwell::{Events, LatencyProbe, ProgramStatistics};
///
/// let probe = LatencyProbe::builder().function("ip_rcv").events(Events::None).attach()?;
/// let statistics = ProgramStatistics::enable()?;
/// std::thread::sleep(std::time::Duration::from_secs(1));
/// println!("{}", probe.cost());
/// drop(statistics);
/// # Ok::<(), dwell::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the kernel stops counting when it is dropped"]
pub struct ProgramStatistics(#[expect(dead_code, reason = "the kernel counts as long as it is open")] OwnedFd);

impl ProgramStatistics {
    /// Begins to count. Several may do so at once.
    ///
    /// # Errors
    ///
    /// [`NoPrivilege`](crate::ErrorKind::NoPrivilege) without `CAP_SYS_ADMIN`, [`System`](crate::ErrorKind::System) if the
    /// kernel can't (it came with Linux 5.8).
    pub fn enable() -> Result<Self, Error> {
        driver::enable_statistics().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line says what ran, how often, and how long on average.
    #[test]
    fn reads_well() {
        let cost = |runs, nanos| ProgramCost { runs, time: Duration::from_nanos(nanos) };
        let span = SpanCost {
            span: "ip_rcv".into(),
            starts: cost(10, 455),
            ends: cost(2, 200),
            releases: ProgramCost::default(),
        };
        assert_eq!(span.to_string(), "ip_rcv: starts 10 runs of 45ns ends 2 runs of 100ns");
        assert_eq!(ProgramCost::default().mean(), None);
        assert_eq!(Cost { spans: vec![span.clone(), span] }.to_string().lines().count(), 2);
    }
}
