//! How events get from the reader to the program: one of three ways. None of them waits within; with backpressure the reader
//! asks for room first.

use std::fmt;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crossbeam_channel::Sender;

use crate::batch::BatchSender;
use crate::event::LatencyEvent;
use crate::view::EventView;

/// What a program wants to be called with each event.
pub(crate) type Function = dyn FnMut(&EventView<'_>) + Send;

/// The same, until it panics.
pub(crate) struct Callback(Option<Box<Function>>);

/// The way to the program.
pub(crate) enum Delivery {
    Events { sender: Sender<LatencyEvent>, backpressure: bool },
    Batches { sender: BatchSender, backpressure: bool },
    Callback(Callback),
}

impl Delivery {
    /// With backpressure so many events will be taken for sure.
    pub(crate) fn room(&self) -> usize {
        match self {
            Self::Events { sender, backpressure: true } => {
                sender.capacity().unwrap_or(usize::MAX).saturating_sub(sender.len())
            }
            Self::Batches { sender, backpressure: true } => sender.room(),
            _ => usize::MAX,
        }
    }

    /// Whether the reader may have to wait for the program.
    pub(crate) fn is_patient(&self) -> bool {
        match self {
            Self::Events { backpressure, .. } | Self::Batches { backpressure, .. } => *backpressure,
            Self::Callback(_) => true,
        }
    }

    /// For when there are no more events at the moment.
    pub(crate) fn flush(&mut self) {
        if let Self::Batches { sender, .. } = self {
            sender.flush();
        }
    }

    /// Whether events were taken that the program can't have yet.
    pub(crate) fn is_pending(&self) -> bool {
        matches!(self, Self::Batches { sender, .. } if sender.is_pending())
    }
}

/// What became of something that a callback was needed for.
pub(crate) enum Called<T> {
    Returned(T),
    /// It did so just now.
    Panicked,
    /// It has panicked before, so it isn't called any more.
    Never,
}

impl Callback {
    pub(crate) fn new(function: impl FnMut(&EventView<'_>) + Send + 'static) -> Self {
        Self(Some(Box::new(function)))
    }

    /// Lends it to `work`, and catches its panic.
    pub(crate) fn guard<T>(&mut self, work: impl FnOnce(&mut Function) -> T) -> Called<T> {
        let Some(function) = &mut self.0 else { return Called::Never };
        // It isn't called again, so nobody sees what it left half done.
        let result = catch_unwind(AssertUnwindSafe(|| work(&mut **function)));
        match result {
            Ok(value) => Called::Returned(value),
            Err(panic) => {
                // Its own drop might panic, too.
                mem::forget(panic);
                let broken = self.0.take();
                let _ = catch_unwind(AssertUnwindSafe(|| drop(broken)));
                Called::Panicked
            }
        }
    }
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Events { .. } => "Events",
            Self::Batches { .. } => "Batches",
            Self::Callback(_) => "Callback",
        })
    }
}
