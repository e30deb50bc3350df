//! How exactness is obtained on this kernel.

/// How a span's end is matched with its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pairing {
    /// By the address of the call's own trampoline frame, which entry and exit programs share: no two calls in flight
    /// have the same, whatever their tasks.
    Frame,
    /// By a key that start and end both see: a packet, a socket, a flow, a thread. See [`Key`](crate::Key).
    Key,
}

/// Where started calls wait for their exit. Chosen by what the kernel can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Store {
    /// A set-associative table without locks, with a hash map behind it.
    Table,
    /// A hash map alone, on kernels without atomic compare-and-swap for BPF (before 5.12). Exact as well, but it costs
    /// each call several hundred nanoseconds more, some of them within the measured latency.
    HashMap,
}
