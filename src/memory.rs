//! What a probe takes of the machine's memory: [`Memory`].

use std::fmt;

/// What a probe takes of the machine's memory, in bytes; see [`LatencyProbe::memory`](crate::LatencyProbe::memory).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Memory {
    /// The kernel's memory for maps: rings, starts in flight, counters, histograms, the slowest. As the kernel itself says
    /// it, which before Linux 6.4 leaves out what hash maps take beside their entries.
    pub maps: u64,
    /// The kernel's memory for programs, as they were verified and as the CPU runs them.
    pub programs: u64,
    /// This process's memory for events that wait to be received, when it is full. Stories come on top.
    pub channel: u64,
}

impl Memory {
    /// All of the kernel's. From Linux 5.11 on it counts for the memory cgroup that this process was in when it attached;
    /// before, the maps and about half of the programs' count as locked memory of its user.
    pub fn kernel(&self) -> u64 {
        self.maps + self.programs
    }
}

/// `maps 3.4 MiB programs 0.1 MiB channel 4.5 MiB`
impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let Self { maps, programs, channel } = *self;
        write!(f, "maps {:.1} MiB programs {:.1} MiB channel {:.1} MiB", mib(maps), mib(programs), mib(channel))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On one line, in MiB.
    #[test]
    fn reads_well() {
        let memory = Memory { maps: 3 << 20, programs: 100 << 10, channel: 5_000_000 };
        assert_eq!(memory.to_string(), "maps 3.0 MiB programs 0.1 MiB channel 4.8 MiB");
        assert_eq!(memory.kernel(), (3 << 20) + (100 << 10));
    }
}
