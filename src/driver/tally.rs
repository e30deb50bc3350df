//! What became of the records.

use std::sync::atomic::{AtomicU64, Ordering};

/// What became of the records of all spans.
#[derive(Debug)]
pub(crate) struct Tally {
    spans: Vec<SpanTally>,
    pub(super) undecodable: Count,
}

/// What became of a span's records.
#[derive(Debug, Default)]
pub(crate) struct SpanTally {
    /// Handed over.
    pub(crate) delivered: Count,
    /// Not taken: the channel was full.
    pub(crate) channel_dropped: Count,
    /// Of no certain pair.
    pub(crate) withheld: Count,
}

impl SpanTally {
    /// Counts an event that was taken, or wasn't: a slow program costs events, not the kernel's time.
    #[inline]
    pub(super) fn count(&self, taken: bool) {
        if taken { &self.delivered } else { &self.channel_dropped }.add_one();
    }
}

/// A number that one thread counts and others may read.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Only for the reader thread. With one thread that counts, an addition needn't be atomic, and costs nothing.
    #[inline]
    pub(super) fn add_one(&self) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }
}

impl Tally {
    pub(super) fn new(spans: usize) -> Self {
        Self { spans: (0..spans).map(|_| SpanTally::default()).collect(), undecodable: Count::default() }
    }

    /// Of the span number `index`, which there must be.
    #[inline]
    pub(crate) fn span(&self, index: usize) -> &SpanTally {
        &self.spans[index]
    }

    pub(crate) fn undecodable(&self) -> u64 {
        self.undecodable.get()
    }
}
