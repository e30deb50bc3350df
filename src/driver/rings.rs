//! The rings in which programs leave records: one for each CPU, in the memory of one map.
//!
//! An element of the map is a ring: `struct dwell_ring_head`, then slots of equal size, a power of two of them. A slot is
//! a number and a record. Who writes record number n (they begin with 0) takes slot n modulo their number, if n is below
//! `limit`, and makes the slot's number n + 1 when the record is whole; see `ring.bpf.h`.
//!
//! Every record is read where it is, and costs neither a system call nor a copy.

#![expect(unsafe_code, reason = "to map memory, and to look at records in it")]

use std::ffi::c_void;
use std::mem::offset_of;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::{Errno, Result};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::param::page_size;

use crate::prefetch;
use crate::wire::{FULL, IDENTIFIED, LONG, RingHead, SHORT};

const WORD: usize = size_of::<u64>();
const HEAD: usize = offset_of!(RingHead, head) / WORD;
const LIMIT: usize = offset_of!(RingHead, limit) / WORD;
const HEAD_WORDS: usize = size_of::<RingHead>() / WORD;
/// Records that are taken from a CPU's ring before it is the next one's turn.
const TURN: usize = 256;
/// Records after which their room is given back. Each time costs the CPU that writes a cache miss.
const GIVE_BACK: usize = 64;
/// So many records ahead the memory is asked for.
const AHEAD: usize = 6;
/// The bytes of a slot for a record of so many.
pub(super) const fn stride(record: usize) -> usize {
    WORD + record
}

/// Of a call's record.
pub(super) const CALL_STRIDE: usize = stride(SHORT);
/// The same in words.
const CALL_SLOT: usize = CALL_STRIDE / WORD;

/// The reading end of all CPUs' rings.
#[derive(Debug)]
pub(super) struct CpuRings {
    memory: Mapping,
    /// The words of a ring, and of a slot.
    ring: usize,
    slot: usize,
    slots: usize,
    /// For each CPU the records that were read,
    tails: Vec<u64>,
    /// and those that were there when `look` looked.
    heads: Vec<u64>,
    /// Whose turn it is.
    next: usize,
}

impl CpuRings {
    /// Maps a new map with an element of `value_size` bytes for each of `cpus` CPUs: `slots` slots of `stride` bytes each.
    pub(super) fn map(fd: impl AsFd, cpus: usize, value_size: usize, slots: usize, stride: usize) -> Result<Self> {
        let strides = [SHORT, LONG, IDENTIFIED, FULL].map(self::stride);
        let whole = value_size % WORD == 0 && strides.contains(&stride);
        let needed = slots.checked_mul(stride).and_then(|slots| slots.checked_add(size_of::<RingHead>()));
        let fits = needed.is_some_and(|needed| needed <= value_size) && slots.is_power_of_two();
        if !whole || !fits || cpus == 0 {
            return Err(Errno::INVAL);
        }
        let memory = Mapping::new(fd, value_size.checked_mul(cpus).ok_or(Errno::INVAL)?)?;
        let rings = Self {
            memory,
            ring: value_size / WORD,
            slot: stride / WORD,
            slots,
            tails: vec![0; cpus],
            heads: vec![0; cpus],
            next: 0,
        };
        for cpu in 0..cpus {
            rings.ring(cpu)[LIMIT].store(slots as u64, Ordering::Release);
        }
        Ok(rings)
    }

    /// The records that there is room for on each CPU.
    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// Looks how far the rings have been filled, or are being filled. Whether there is anything to take.
    pub(super) fn look(&mut self) -> bool {
        for cpu in 0..self.heads.len() {
            self.heads[cpu] = self.ring(cpu)[HEAD].load(Ordering::Acquire);
        }
        self.heads != self.tails
    }

    /// Hands up to `limit` records of those that were there when it was last looked to `accept`, of each CPU in order, and
    /// of all CPUs in turns. How many it were; if fewer, then each CPU's ring was empty for a moment.
    ///
    /// A record that is still being written holds up those behind it. If `accept` panics, that record counts as taken.
    pub(super) fn take(&mut self, limit: usize, mut accept: impl FnMut(&[u8])) -> usize {
        let (mut taken, mut emptied) = (0, 0);
        while taken < limit && emptied < self.tails.len() {
            let turn = TURN.min(limit - taken);
            let some = self.take_from(self.next, turn, &mut accept);
            taken += some;
            emptied = if some < turn { emptied + 1 } else { 0 };
            self.next = (self.next + 1) % self.tails.len();
        }
        taken
    }

    fn take_from(&mut self, cpu: usize, limit: usize, accept: &mut impl FnMut(&[u8])) -> usize {
        let first = self.tails[cpu];
        let end = self.heads[cpu].min(first + limit as u64);
        while self.tails[cpu] < end {
            let tail = self.tails[cpu];
            // As far as they lie one behind the other, and to where their room is given back.
            let at = tail as usize & (self.slots - 1);
            let run = ((end - tail) as usize).min(self.slots - at).min(GIVE_BACK - at % GIVE_BACK);
            let ring = &self.memory[cpu * self.ring..][..self.ring];
            let slots = &ring[HEAD_WORDS + at * self.slot..][..run * self.slot];
            let mut progress = Progress { tail: &mut self.tails[cpu], slots: self.slots, limit: &ring[LIMIT] };
            // With the size known when it is compiled, a slot costs a few instructions. Not for each size, or compilers
            // would make a function of `accept`, and take the way there and back for each record.
            match self.slot {
                CALL_SLOT => progress.take(slots, CALL_SLOT, accept),
                slot => progress.take(slots, slot, accept),
            }
            drop(progress);
            if self.tails[cpu] < tail + run as u64 {
                break;
            }
        }
        (self.tails[cpu] - first) as usize
    }

    fn ring(&self, cpu: usize) -> &[AtomicU64] {
        &self.memory[cpu * self.ring..][..self.ring]
    }
}

/// How far a ring has been read. The programs learn it when this goes, also if `accept` panics.
struct Progress<'a> {
    tail: &'a mut u64,
    slots: usize,
    limit: &'a AtomicU64,
}

impl Progress<'_> {
    /// Hands the records of so large slots to `accept`, up to one that isn't whole.
    #[inline(always)]
    fn take(&mut self, mut slots: &[AtomicU64], slot: usize, accept: &mut impl FnMut(&[u8])) {
        // Chunks would be counted first, by a division.
        while let Some((words, rest)) = slots.split_at_checked(slot) {
            let Some((whole, record)) = words.split_first() else { break };
            slots = rest;
            if whole.load(Ordering::Acquire) != *self.tail + 1 {
                break;
            }
            *self.tail += 1;
            prefetch::for_reading(words.as_ptr().wrapping_add(AHEAD * slot), slot);
            // SAFETY: these are bytes of a slice, which lives as long. Nobody writes to them before the limit says that this
            // record has been read. What was written is there since the store of the number has been seen.
            accept(unsafe { slice::from_raw_parts(record.as_ptr().cast(), size_of_val(record)) });
        }
    }
}

impl Drop for Progress<'_> {
    fn drop(&mut self) {
        self.limit.store(*self.tail + self.slots as u64, Ordering::Release);
    }
}

/// Memory that is shared with the kernel.
#[derive(Debug)]
struct Mapping {
    start: NonNull<c_void>,
    /// In bytes, a multiple of the page size.
    len: usize,
}

impl Mapping {
    fn new(fd: impl AsFd, bytes: usize) -> Result<Self> {
        let len = bytes.checked_next_multiple_of(page_size()).ok_or(Errno::INVAL)?;
        // The memory is there already; mapped page by page it would cost a fault for every few dozens of records.
        // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
        let start = unsafe {
            mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::POPULATE, fd, 0)
        }?;
        Ok(Self { start: NonNull::new(start).ok_or(Errno::NOMEM)?, len })
    }
}

impl Deref for Mapping {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: these words were mapped for reading and writing, begin at a page, and stay until `self` is dropped. Others
        // write to them, as they may to atomics.
        unsafe { slice::from_raw_parts(self.start.cast().as_ptr(), self.len / WORD) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is a mapping of ours, and nothing borrows from it any more.
        let _ = unsafe { munmap(self.start.as_ptr(), self.len) };
    }
}

// SAFETY: the memory is only reached as atomics, and belongs to no thread.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    const CPUS: usize = 3;
    const SLOTS: usize = 8;
    const STRIDE: usize = 88;
    const VALUE: usize = 128 + SLOTS * STRIDE + 8;

    /// Rings as programs see them.
    struct Writer {
        memory: Mapping,
    }

    fn file() -> File {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let name = format!("dwell-rings-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file.set_len((CPUS * VALUE) as u64).unwrap();
        file
    }

    fn rings() -> (Writer, CpuRings) {
        let file = file();
        let rings = CpuRings::map(&file, CPUS, VALUE, SLOTS, STRIDE).unwrap();
        (Writer { memory: Mapping::new(&file, CPUS * VALUE).unwrap() }, rings)
    }

    impl Writer {
        fn word(&self, cpu: usize, offset: usize) -> &AtomicU64 {
            &self.memory[(cpu * VALUE + offset) / 8]
        }

        /// As `reserve()` in the programs; the record's number.
        fn reserve(&self, cpu: usize) -> Option<u64> {
            let head = self.word(cpu, 0).load(Ordering::Acquire);
            if head >= self.word(cpu, 64).load(Ordering::Acquire) {
                return None;
            }
            self.word(cpu, 0).store(head + 1, Ordering::Release);
            Some(head)
        }

        /// As `submit()`.
        fn submit(&self, cpu: usize, number: u64, value: u64) {
            let slot = 128 + number as usize % SLOTS * STRIDE;
            self.word(cpu, slot + 8).store(value, Ordering::Relaxed);
            self.word(cpu, slot + 80).store(!value, Ordering::Relaxed);
            self.word(cpu, slot).store(number + 1, Ordering::Release);
        }

        fn write(&self, cpu: usize, value: u64) -> bool {
            self.reserve(cpu).inspect(|number| self.submit(cpu, *number, value)).is_some()
        }
    }

    fn take(rings: &mut CpuRings, limit: usize) -> Vec<u64> {
        let mut values = Vec::new();
        rings.look();
        let taken = rings.take(limit, |bytes| {
            let words: Vec<_> =
                bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect();
            assert_eq!(words.len(), 10);
            assert_eq!(words[0], !words[9]);
            values.push(words[0]);
        });
        assert_eq!(taken, values.len());
        values
    }

    /// What is written is read, once and in order, round and round.
    #[test]
    fn in_order() {
        let (writer, mut rings) = rings();
        assert_eq!(take(&mut rings, 100), []);
        for lap in 0..100 {
            let values = lap * 10..lap * 10 + 5;
            assert!(values.clone().all(|value| writer.write(1, value)));
            assert_eq!(take(&mut rings, 100), values.collect::<Vec<_>>());
            assert_eq!(take(&mut rings, 100), []);
        }
    }

    /// A full ring takes no more, until what was read has been given back.
    #[test]
    fn full() {
        let (writer, mut rings) = rings();
        assert_eq!((0..20).filter(|value| writer.write(0, *value)).count(), SLOTS);
        assert!(writer.write(1, 100));
        assert_eq!(take(&mut rings, 3), [0, 1, 2]);
        assert_eq!((20..30).filter(|value| writer.write(0, *value)).count(), 3);
        assert_eq!(take(&mut rings, 100), [100, 3, 4, 5, 6, 7, 20, 21, 22]);
    }

    /// A record that isn't whole holds up those behind it, on its CPU.
    #[test]
    fn unfinished() {
        let (writer, mut rings) = rings();
        let first = writer.reserve(0).unwrap();
        assert!(writer.write(0, 2) && writer.write(2, 3));
        assert_eq!(take(&mut rings, 100), [3]);
        writer.submit(0, first, 1);
        assert_eq!(take(&mut rings, 100), [1, 2]);
    }

    /// Two threads write while a third reads: nothing is lost, doubled or half written.
    #[test]
    fn while_being_written() {
        const EACH: u64 = 100_000;
        let (writer, mut rings) = rings();
        std::thread::scope(|scope| {
            for cpu in [0, 2] {
                let writer = &writer;
                scope.spawn(move || {
                    for value in 0..EACH {
                        while !writer.write(cpu, value * 4 + cpu as u64) {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let mut next = [0, 0, 2, 0];
            let mut left = 2 * EACH;
            while left > 0 {
                let values = take(&mut rings, 1_000);
                for value in &values {
                    let expected = &mut next[(value % 4) as usize];
                    assert_eq!(value, expected);
                    *expected += 4;
                }
                left -= values.len() as u64;
                if values.is_empty() {
                    std::thread::yield_now();
                }
            }
        });
        assert_eq!(take(&mut rings, 10), []);
    }

    /// Who panics at a record isn't shown it again, and holds up nobody.
    #[test]
    fn panics() {
        let (writer, mut rings) = rings();
        assert!((0..5).all(|value| writer.write(0, value)));
        rings.look();
        let mut seen = 0;
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            rings.take(100, |_| {
                seen += 1;
                assert!(seen < 3, "as a callback may");
            })
        }));
        assert!(result.is_err());
        assert!((5..8).all(|value| writer.write(0, value)) && writer.write(0, 8));
        assert_eq!(take(&mut rings, 100), [3, 4, 5, 6, 7, 8]);
    }

    /// What can't be rings is refused.
    #[test]
    fn nonsense() {
        let file = file();
        let map = |cpus, value, slots, stride| CpuRings::map(&file, cpus, value, slots, stride).map(drop);
        assert_eq!(map(CPUS, VALUE, SLOTS, STRIDE), Ok(()));
        assert_eq!(map(0, VALUE, SLOTS, STRIDE), Err(Errno::INVAL));
        assert_eq!(map(CPUS, VALUE, 7, STRIDE), Err(Errno::INVAL));
        assert_eq!(map(CPUS, VALUE, 16, STRIDE), Err(Errno::INVAL));
        assert_eq!(map(CPUS, VALUE, SLOTS, 8), Err(Errno::INVAL));
        assert_eq!(map(CPUS, VALUE, SLOTS, 80), Err(Errno::INVAL));
        assert_eq!(map(CPUS, VALUE - 4, SLOTS, STRIDE), Err(Errno::INVAL));
        assert_eq!(map(CPUS, VALUE, usize::MAX / 2 + 1, STRIDE), Err(Errno::INVAL));
        assert_eq!(map(usize::MAX, VALUE, SLOTS, STRIDE), Err(Errno::INVAL));
    }
}
