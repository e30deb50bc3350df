//! How a probe ends its reader.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use crate::error::Error;

/// What the probe wants of its reader.
#[derive(Debug)]
pub(super) struct Stop {
    wanted: AtomicBool,
    hurried: AtomicBool,
    /// An eventfd, to interrupt the reader's sleep.
    wake: OwnedFd,
}

impl Stop {
    pub(super) fn new() -> Result<Self, Error> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
            let errno = errno.raw_os_error();
            Error::system("creating an eventfd", errno).with_errno(errno)
        })?;
        Ok(Self { wanted: AtomicBool::new(false), hurried: AtomicBool::new(false), wake })
    }

    /// The reader is to end once it has taken what is there.
    pub(super) fn want(&self) {
        self.wanted.store(true, Ordering::Release);
        // Can only fail if the counter is full, and then the reader wakes as well.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Acquire)
    }

    /// And it is to wait for the program no longer.
    pub(super) fn hurry(&self) {
        self.hurried.store(true, Ordering::Release);
    }

    #[inline]
    pub(super) fn is_hurried(&self) -> bool {
        self.hurried.load(Ordering::Relaxed)
    }
}

/// Readable from [`want`](Stop::want) on.
impl AsFd for Stop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
