//! What happens with each record: checked, withheld where its pair is in doubt, handed over.

use std::sync::Arc;

use super::doubt::Doubt;
use super::rings::CpuRings;
use super::state::Programs;
use super::tally::{SpanTally, Tally};
use crate::decode::Codec;
use crate::delivery::{Called, Delivery};
use crate::event::MonotonicTime;
use crate::span::Key;
use crate::view::EventView;

/// A record of this length only says that there are others to be read.
const DOORBELL: usize = 8;

/// From a record to the program.
pub(super) struct Intake {
    codec: Arc<Codec>,
    delivery: Delivery,
    tally: Arc<Tally>,
    programs: Arc<Programs>,
    doubts: Vec<Doubt>,
}

impl Intake {
    pub(super) fn new(codec: Arc<Codec>, delivery: Delivery, tally: Arc<Tally>, programs: Arc<Programs>) -> Self {
        let doubts = codec.spans.iter().map(|_| Doubt::new()).collect();
        Self { codec, delivery, tally, programs, doubts }
    }

    /// Before records are taken that were there already: asks what the kernel has skipped by now, so that of each of their
    /// pairs it can be said whether it is certain.
    pub(super) fn look(&mut self) {
        for (span, codec) in self.codec.spans.iter().enumerate().filter(|(_, codec)| codec.doubted) {
            let skipped = self.programs.skipped_in_doubt(span, codec.key == Key::Call);
            self.doubts[span].note(skipped, MonotonicTime::now());
        }
    }

    /// Takes up to `limit` records from rings. How many it were; if fewer, then there are no more at the moment.
    pub(super) fn take(&mut self, rings: &mut CpuRings, limit: usize) -> usize {
        let records = Records { codec: &self.codec, tally: &self.tally, doubts: &self.doubts };
        // For each way a loop of its own, which doesn't ask at each record which it is.
        match &mut self.delivery {
            Delivery::Events(sender) => rings.take(limit, |bytes| {
                records.check(bytes, |view, tally| tally.count(sender.try_send(view.to_event()).is_ok()));
            }),
            Delivery::Batches(sender) => rings.take(limit, |bytes| {
                records.check(bytes, |view, tally| tally.count(sender.push(|| view.to_event())));
            }),
            Delivery::Callback(callback) => {
                let taken = callback.guard(|function| {
                    rings.take(limit, |bytes| {
                        records.check(bytes, |view, tally| {
                            // Before it panics.
                            tally.count(true);
                            function(view);
                        });
                    })
                });
                match taken {
                    Called::Returned(taken) => taken,
                    // Not the end, then.
                    Called::Panicked => limit,
                    Called::Never => rings.take(limit, |bytes| records.check(bytes, |_, tally| tally.count(false))),
                }
            }
        }
    }

    /// Takes a record of the kernel's ring buffer.
    pub(super) fn accept(&mut self, bytes: &[u8]) {
        if bytes.len() == DOORBELL {
            return;
        }
        let Self { codec, delivery, tally, doubts, .. } = self;
        let records = Records { codec, tally, doubts };
        records.check(bytes, |view, tally| tally.count(delivery.deliver(view)));
    }

    /// For when there are no more records at the moment.
    pub(super) fn flush(&mut self) {
        self.delivery.flush();
    }

    /// Whether something waits for the next `flush`.
    pub(super) fn is_pending(&self) -> bool {
        self.delivery.is_pending()
    }
}

/// What it takes to tell good records from others.
struct Records<'a> {
    codec: &'a Codec,
    tally: &'a Tally,
    doubts: &'a [Doubt],
}

impl Records<'_> {
    /// Hands a record over, if it is one, and its pair is certain.
    #[inline(always)]
    fn check(&self, bytes: &[u8], hand_over: impl FnOnce(&EventView<'_>, &SpanTally)) {
        let Ok(view) = self.codec.view(bytes) else {
            self.tally.undecodable.add_one();
            return;
        };
        let tally = self.tally.span(view.index());
        if view.is_suspect() && !self.doubts[view.index()].is_ruled_out(view.start()) {
            tally.withheld.add_one();
        } else {
            hand_over(&view, tally);
        }
    }
}
