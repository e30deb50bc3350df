//! The histograms that the kernel keeps of a span, and which of their pairs are believed.
//!
//! Pairs that are certain by themselves are in a row for each CPU. Those that are only certain if the kernel has skipped
//! none of the span's programs since they began (see `doubt`) are in rows of their own. They are believed, as a whole, if
//! by the time they are read nothing has been skipped since the last time; else all that came since are in doubt, and the
//! programs are told to throw away what began before.
//!
//! Of calls more can be said. A call whose entry was skipped does no harm if its exit found nothing: that is counted.
//! So if there were as many exits without a start as entries were skipped (or found no room, or lost their start to
//! `sweep`), then no exit has met another call's start. A call that began while the probe was off doesn't count among
//! them: its entry leaves a note for its exit, and one that was there before the programs has no exit that they could
//! see.

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::sync::{Arc, Mutex, PoisonError};

use libbpf_rs::{MapCore as _, MapFlags, MapHandle, MapType};
use rustix::thread::{MembarrierCommand, membarrier};

use super::state::{Counted, StateMaps};
use super::{create_map, errno, possible_cpus, system_error};
use crate::error::Error;
use crate::event::MonotonicTime;
use crate::group::GroupBy;
use crate::histogram::Histogram;
use crate::wire::{RawHistogram, words};

/// A span's histograms in the kernel.
#[derive(Debug)]
pub(crate) struct Latencies {
    /// Of each CPU: one of certain pairs, and, if there can be others, one of those.
    rows: MapHandle,
    by_cpu: bool,
    /// Of each group the same, one behind the other.
    groups: Option<MapHandle>,
    settled: Mutex<Settled>,
}

/// Whose histogram it is: a group's, or that of all that is in no group.
pub(crate) type Group = Option<u64>;

/// What had been read by the last time.
#[derive(Debug, Default)]
struct Settled {
    /// How often the kernel had skipped the span's programs.
    skipped: u64,
    cells: BTreeMap<Group, Cell>,
    /// Pairs that aren't believed.
    doubtful: u64,
}

#[derive(Debug, Default)]
struct Cell {
    certain: Histogram,
    uncertain: Histogram,
    /// Of the uncertain ones.
    believed: Histogram,
    any_doubtful: bool,
}

/// A span's histograms at one time.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    pub(crate) groups: BTreeMap<Group, Histogram>,
    /// Pairs that were counted in the kernel, and aren't believed.
    pub(crate) doubtful: u64,
}

impl Latencies {
    pub(super) fn create(has_uncertain: bool, by: Option<GroupBy>, max_groups: u32) -> libbpf_rs::Result<Self> {
        let value = size_of::<RawHistogram>() as u32;
        let kinds = 1 + u32::from(has_uncertain);
        let rows = create_map(MapType::PercpuArray, "dwell_histograms", 4, value, kinds, 0)?;
        let empty: Vec<Vec<u8>> = vec![empty_row(); possible_cpus()];
        for kind in 0..kinds {
            rows.update_percpu(&kind.to_ne_bytes(), &empty, MapFlags::ANY)?;
        }
        let in_kernel = by.is_some_and(|by| by != GroupBy::Cpu);
        let groups = in_kernel
            .then(|| create_map(MapType::Hash, "dwell_groups", 8, value * kinds, max_groups, 0))
            .transpose()?;
        let by_cpu = by == Some(GroupBy::Cpu);
        Ok(Self { rows, by_cpu, groups, settled: Mutex::default() })
    }

    pub(super) fn rows(&self) -> &MapHandle {
        &self.rows
    }

    pub(super) fn groups(&self) -> Option<&MapHandle> {
        self.groups.as_ref()
    }

    /// All latencies so far that are believed. `skipped` says how often the kernel has skipped the span's programs (of
    /// `frames`: its entries).
    pub(super) fn read(
        &self,
        parts: &[Arc<StateMaps>],
        frames: bool,
        skipped: impl Fn() -> u64,
    ) -> Result<Reading, Error> {
        let mut settled = self.settled.lock().unwrap_or_else(PoisonError::into_inner);
        let mut cells = self.cells()?;
        // Asked after reading: if nothing was skipped by now, nothing was in all that was read.
        let mut now_skipped = skipped();
        let all_certain = self.rows.max_entries() == 1;
        let mut believed = all_certain || now_skipped == settled.skipped;
        if !believed && frames {
            let count = || Counted::of(parts.iter().map(Arc::as_ref));
            let unmatched = count().counters.unmatched;
            // What may have led to them is asked for after them, so that it isn't less than that.
            let Counted { counters, swept, .. } = count();
            now_skipped = skipped();
            believed = now_skipped + counters.untracked + counters.unseen + swept <= unmatched;
        }
        if believed {
            settled.skipped = now_skipped;
        } else {
            let now = MonotonicTime::now();
            for part in parts {
                part.doubt_before(now).map_err(|error| system_error("writing to a map", &error))?;
            }
            // Programs that don't know this yet are done when this returns; where it can't be had, they are soon.
            let _ = membarrier(MembarrierCommand::Global);
            // Should it fail, then nothing of this has happened yet.
            cells = self.cells()?;
            settled.skipped = now_skipped;
        }
        let mut reading = Reading::default();
        for (group, (certain, uncertain)) in cells {
            let cell = settled.cells.entry(group).or_default();
            let new = uncertain.since(&cell.uncertain);
            cell.any_doubtful |= !believed && !new.is_empty();
            if !cell.any_doubtful {
                // Not put together from differences, which know the extremes less well.
                cell.believed = uncertain.clone();
            } else if believed {
                cell.believed.merge(&new);
            }
            (cell.certain, cell.uncertain) = (certain, uncertain);
            if !believed {
                settled.doubtful += new.count();
            }
        }
        for (group, cell) in &settled.cells {
            let mut histogram = cell.certain.clone();
            histogram.merge(&cell.believed);
            reading.groups.insert(*group, histogram);
        }
        reading.doubtful = settled.doubtful;
        Ok(reading)
    }

    /// What the kernel has: for each group, of certain and of uncertain pairs.
    fn cells(&self) -> Result<BTreeMap<Group, (Histogram, Histogram)>, Error> {
        let mut cells: BTreeMap<Group, (Histogram, Histogram)> = BTreeMap::new();
        let failed = |error: libbpf_rs::Error| {
            let errno = errno(&error);
            Error::system("reading a histogram", errno).with_errno(errno)
        };
        for kind in 0..self.rows.max_entries() {
            let row = self.rows.lookup_percpu(&kind.to_ne_bytes(), MapFlags::ANY).map_err(failed)?;
            for (cpu, bytes) in row.unwrap_or_default().iter().enumerate() {
                let (certain, uncertain) = cells.entry(self.by_cpu.then_some(cpu as u64)).or_default();
                add(if kind == 0 { certain } else { uncertain }, bytes);
            }
        }
        let Some(groups) = &self.groups else { return Ok(cells) };
        let mut bytes = vec![0; groups.value_size() as usize];
        // No group is ever deleted, so the kernel gets to each.
        for key in groups.keys() {
            let Some(group) = key.as_slice().try_into().ok().map(u64::from_ne_bytes) else { continue };
            groups.lookup_into(&key, &mut bytes, MapFlags::ANY).map_err(failed)?;
            let (certain, uncertain) = cells.entry(Some(group)).or_default();
            for (histogram, bytes) in [certain, uncertain].into_iter().zip(bytes.chunks(size_of::<RawHistogram>())) {
                add(histogram, bytes);
            }
        }
        Ok(cells)
    }
}

/// Adds one CPU's, or one group's.
fn add(histogram: &mut Histogram, bytes: &[u8]) {
    histogram.add_raw(&words(bytes));
}

/// That of a CPU that has counted nothing.
fn empty_row() -> Vec<u8> {
    let mut row = vec![0; size_of::<RawHistogram>()];
    let min = offset_of!(RawHistogram, min);
    row[min..min + size_of::<u64>()].copy_from_slice(&u64::MAX.to_ne_bytes());
    row
}
