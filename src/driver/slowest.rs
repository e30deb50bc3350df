//! The slowest spans, which the programs keep until somebody asks: `slowest.bpf.h`.
//!
//! Each CPU has two banks. To ask is to have the programs go on in the other one, to wait until those are done that may
//! still write to the first, and to read that. So nothing that is read is half written, and nobody waits for the reader.

use std::sync::{Mutex, PoisonError};

use libbpf_rs::{MapCore as _, MapFlags, MapHandle, MapType};
use rustix::thread::{MembarrierCommand, membarrier};

use super::doubt::Doubt;
use super::{FIRST_KEY, create_flag, create_map, possible_cpus, system_error};
use crate::decode::Codec;
use crate::error::Error;
use crate::event::{LatencyEvent, MonotonicTime};
use crate::plan::SpanPlan;
use crate::slowest::Slowest;
use crate::wire::{FULL, SlowestHead, words};

/// The banks of each CPU.
const BANKS: u64 = 2;
/// What is before each record: its rank.
const RANK: usize = size_of::<u64>();

/// What the kernel keeps of a span.
#[derive(Debug)]
pub(crate) struct Keeper {
    places: MapHandle,
    generation: MapHandle,
    shape: Shape,
    cpus: u32,
    asked: Mutex<Asked>,
}

/// How many records an element has room for, of which size.
#[derive(Debug, Clone, Copy)]
struct Shape {
    count: usize,
    record: usize,
}

/// What was so when it was asked for the last time.
#[derive(Debug)]
struct Asked {
    generation: u64,
    doubt: Doubt,
    /// What the programs had counted as not kept, of each bank.
    unkept: [u64; BANKS as usize],
}

/// A record that was kept, where every record begins at a multiple of 8 bytes.
#[repr(align(8))]
struct Aligned([u8; FULL]);

impl Keeper {
    /// `None`: of this span none are wanted.
    pub(super) fn create(plan: &SpanPlan) -> libbpf_rs::Result<Option<Self>> {
        let Some(count) = plan.slowest else { return Ok(None) };
        let shape = Shape { count: count.get() as usize, record: plan.more().needs };
        let cpus = possible_cpus() as u32;
        let places = create_map(MapType::Array, "dwell_slowest", 4, shape.element() as u32, BANKS as u32 * cpus, 0)?;
        let asked = Asked { generation: 0, doubt: Doubt::new(), unkept: [0; BANKS as usize] };
        Ok(Some(Self { places, generation: create_flag(".data.slowest")?, shape, cpus, asked: Mutex::new(asked) }))
    }

    pub(super) fn places(&self) -> &MapHandle {
        &self.places
    }

    pub(super) fn generation(&self) -> &MapHandle {
        &self.generation
    }

    pub(super) fn count(&self) -> usize {
        self.shape.count
    }

    /// The bytes of a place for a record.
    pub(super) fn stride(&self) -> usize {
        self.shape.stride()
    }

    /// The slowest since the last time. `skipped` says how often the kernel has skipped those of the span's programs that
    /// put a pair in doubt.
    pub(super) fn take(&self, codec: &Codec, span: usize, skipped: impl Fn() -> u64) -> Result<Slowest, Error> {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let (generation, next) = (asked.generation, asked.generation + 1);
        self.generation
            .update(&FIRST_KEY, &next.to_ne_bytes(), MapFlags::ANY)
            .map_err(|error| system_error("writing to a map", &error))?;
        asked.generation = next;
        // Programs that don't know this yet are done when this returns. Where it can't be had they are soon, and what one
        // has half written is recognised.
        let _ = membarrier(MembarrierCommand::Global);
        // All that were kept have ended by now.
        asked.doubt.note(skipped(), MonotonicTime::now());

        let bank = generation % BANKS;
        let mut element = vec![0; self.shape.element()];
        let (mut kept, mut unkept, mut unreadable) = (Vec::new(), 0, 0);
        for cpu in 0..self.cpus {
            let key = BANKS as u32 * cpu + bank as u32;
            self.places
                .lookup_into(&key.to_ne_bytes(), &mut element, MapFlags::ANY)
                .map_err(|error| system_error("reading the slowest spans", &error))?;
            let head = SlowestHead::from_bytes(&element);
            unkept = head.unkept.saturating_add(unkept);
            // A CPU that has kept nothing since has what it kept in an earlier generation.
            if head.generation != generation {
                continue;
            }
            for record in self.shape.records(&element) {
                match record.and_then(|record| decode(codec, span, record)) {
                    Some((event, is_suspect)) => {
                        let is_believed = !is_suspect || asked.doubt.is_ruled_out(event.start);
                        kept.push((event, is_believed));
                    }
                    None => unreadable += 1,
                }
            }
        }
        let before = std::mem::replace(&mut asked.unkept[bank as usize], unkept);
        Ok(Slowest::pick(kept, self.shape.count, unkept.saturating_sub(before) + unreadable))
    }
}

impl Shape {
    fn stride(self) -> usize {
        RANK + self.record
    }

    /// The bytes of one CPU's bank.
    fn element(self) -> usize {
        size_of::<SlowestHead>() + self.count * self.stride()
    }

    /// The records within an element; `None` in the place of one that isn't whole.
    fn records(self, element: &[u8]) -> impl Iterator<Item = Option<&[u8]>> {
        let places = element.get(size_of::<SlowestHead>()..).unwrap_or_default();
        places.chunks_exact(self.stride()).filter_map(|place| {
            let words = words(place.get(..RANK + 2 * size_of::<u64>())?);
            match *words {
                // Free.
                [0, ..] => None,
                // A record's second word is the latency.
                [rank, _, latency] if rank == latency.wrapping_add(1) => Some(place.get(RANK..)),
                _ => Some(None),
            }
        })
    }
}

/// The event that a record tells of, and whether its pair isn't certain by itself.
fn decode(codec: &Codec, span: usize, record: &[u8]) -> Option<(LatencyEvent, bool)> {
    let mut aligned = Aligned([0; FULL]);
    let bytes = aligned.0.get_mut(..record.len())?;
    bytes.copy_from_slice(record);
    let view = codec.view(bytes).ok().filter(|view| view.index() == span)?;
    Some((view.to_event(), view.is_suspect()))
}

/// For fuzzing: the events among what a CPU has kept, whatever it is.
#[cfg(any(test, fuzzing))]
pub(crate) fn kept_records(codec: &Codec, size: u8, element: &[u8]) -> Vec<LatencyEvent> {
    use crate::wire::{IDENTIFIED, LONG, SHORT};

    let record = [SHORT, LONG, IDENTIFIED, FULL][usize::from(size % 4)];
    let _ = SlowestHead::from_bytes(element);
    let records = Shape { count: 1, record }.records(element).flatten();
    let events = records.filter_map(|record| (0..codec.ends.len()).find_map(|span| decode(codec, span, record)));
    events.map(|(event, _)| event).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{IDENTIFIED, LONG, SHORT};

    /// An element of places, each of a rank and the latency of its record.
    fn element(shape: Shape, places: &[(u64, u64)]) -> Vec<u8> {
        let mut element = vec![0; shape.element()];
        let whole = element[size_of::<SlowestHead>()..].chunks_mut(shape.stride());
        for (place, &(rank, latency)) in whole.zip(places) {
            place[..RANK].copy_from_slice(&rank.to_ne_bytes());
            place[RANK + 8..RANK + 16].copy_from_slice(&latency.to_ne_bytes());
        }
        element
    }

    /// Free places have no record, and one whose rank isn't that of its latency isn't whole.
    #[test]
    fn records() {
        for record in [SHORT, LONG, IDENTIFIED, FULL] {
            let shape = Shape { count: 4, record };
            let bytes = element(shape, &[(0, 7), (1, 0), (5, 4), (6, 6)]);
            let latency = |record: &[u8]| u64::from_ne_bytes(record[8..16].try_into().unwrap());
            let records = shape.records(&bytes).map(|found| {
                found.map(|bytes| {
                    assert_eq!(bytes.len(), record);
                    latency(bytes)
                })
            });
            assert_eq!(records.collect::<Vec<_>>(), [Some(0), Some(4), None]);
            assert_eq!(shape.records(&[]).count(), 0);
        }
    }

    /// The head's words are where the kernel has them.
    #[test]
    fn heads() {
        let bytes: Vec<u8> = (1_u64..=8).flat_map(u64::to_ne_bytes).collect();
        let head = SlowestHead::from_bytes(&bytes);
        assert_eq!((head.generation, head.least, head.which, head.lock, head.unkept), (1, 2, 3, 4, 5));
        assert_eq!(SlowestHead::from_bytes(&bytes[..8]), SlowestHead::default());
    }

    /// With as many as can be kept an element is as large as the documentation says.
    #[test]
    fn sizes() {
        let bytes = |record| 2 * Shape { count: 1, record }.element();
        assert_eq!(bytes(SHORT), 128 + 176);
        assert_eq!(bytes(LONG), 128 + 288);
        assert_eq!(bytes(IDENTIFIED), 128 + 480);
        assert_eq!(bytes(FULL), 128 + 1_536);
    }
}
