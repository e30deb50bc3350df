//! How exactness is obtained on this kernel.

/// How a span's end is matched with its start.
///
/// Calls are paired by sessions where the kernel has them and each of the span's functions has room for one more, else
/// by frames. A function may have room for no more than four, of all probes together. [`SpanInfo::pairing`] says which
/// it is.
///
/// [`SpanInfo::pairing`]: crate::SpanInfo::pairing
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pairing {
    /// By a word that the kernel keeps in each call's own frame for one program at entry and exit (`fsession`, Linux 7.0
    /// and later): no pair is ever in doubt, and no call can take another's start.
    Session,
    /// By the address of the call's own trampoline frame, which entry and exit programs share: no two calls in flight
    /// have the same, whatever their tasks.
    Frame,
    /// By a key that start and end both see: a packet, a socket, a flow, a thread. See [`Key`](crate::Key).
    Key,
}

/// Where started spans wait for their end. Chosen by what the kernel can do.
///
/// Calls that are paired by [`Pairing::Session`] only wait there if their span has events, or groups other than CPUs.
/// If not, the word in the call's frame holds all there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Store {
    /// A set-associative table without locks, with a hash map behind it.
    Table,
    /// A hash map alone, on kernels without atomic compare-and-swap for BPF (before 5.12). Exact as well, but it costs
    /// each call several hundred nanoseconds more, some of them within the measured latency.
    HashMap,
}
