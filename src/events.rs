//! Which spans become events: [`Events`].

use std::time::Duration;

use crate::error::Error;

/// Which of the spans that reached their end become events. All of them are in the histogram and in the ledger.
///
/// Where [`with_abandoned`](crate::Span::with_abandoned) asks for events of abandoned spans, the same is asked of
/// those, with the age that they reached as their latency. They are in the ledger, but not in the histogram.
///
/// It is decided in the kernel, before anything is written for the reader: what doesn't become an event costs little
/// more than its place in the histogram.
///
/// ```
/// use std::time::Duration;
/// use dwell::{Events, LatencyProbe};
///
/// let slow = LatencyProbe::builder().function("ip_rcv").events(Events::OverThreshold(Duration::from_micros(50)));
/// let histograms_only = LatencyProbe::builder().function("ip_rcv").events(Events::None);
/// # drop((slow, histograms_only));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Events {
    /// All.
    #[default]
    All,
    /// Those that took at least so long: 0 to 292 years. The others count as
    /// [`below_threshold`](crate::SpanLedger::below_threshold).
    OverThreshold(Duration),
    /// One in so many, 1 to `u32::MAX`, picked by chance, so that nothing periodic in the traffic meets a period of the
    /// picking. The others count as [`unsampled`](crate::SpanLedger::unsampled).
    OneIn(u32),
    /// None. If no span of a probe wants events, it has no rings and no thread.
    None,
}

/// 292 years, the longest latency that a record can carry.
pub(crate) const LONGEST: Duration = Duration::from_nanos(i64::MAX as u64);

impl Events {
    pub(crate) fn check(self) -> Result<(), Error> {
        match self {
            Self::OverThreshold(latency) if latency > LONGEST => {
                Err(Error::config("events", format!("a threshold of {latency:?}: up to 292 years are possible")))
            }
            Self::OneIn(0) => Err(Error::config("events", "one in 0: 1 and more are possible")),
            _ => Ok(()),
        }
    }

    pub(crate) fn are_wanted(self) -> bool {
        self != Self::None
    }

    /// Whether each span that ends becomes one.
    pub(crate) fn are_all(self) -> bool {
        matches!(self, Self::All | Self::OneIn(1)) || self == Self::OverThreshold(Duration::ZERO)
    }
}
