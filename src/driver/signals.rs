//! Keeping signals away from what they would break off.

use std::ffi::c_int;

/// As long as it lives, this thread gets no signals: they wait, or go to other threads.
///
/// The kernel gives up verifying a program once a signal is pending, and libbpf tries five times: a profiler's timer is
/// quicker than that. Those by which the thread itself is at fault are let through.
pub(super) struct Blocked {
    previous: SignalSet,
}

/// `sigset_t`: 1024 bits in each C library of Linux, of which the kernel has 64.
#[repr(C)]
#[derive(Clone, Copy)]
struct SignalSet([u64; 16]);

const SIG_SETMASK: c_int = 2;
/// SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV: the same on all that have BPF trampolines.
const FAULTS: [c_int; 6] = [4, 5, 6, 7, 8, 11];

#[expect(unsafe_code, reason = "rustix has no signal masks")]
unsafe extern "C" {
    fn pthread_sigmask(how: c_int, set: *const SignalSet, previous: *mut SignalSet) -> c_int;
}

impl Blocked {
    pub(super) fn new() -> Self {
        let mut all = [u64::MAX; 16];
        for signal in FAULTS {
            all[0] &= !(1 << (signal - 1));
        }
        Self { previous: set_mask(&SignalSet(all)) }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        set_mask(&self.previous);
    }
}

/// Sets this thread's mask; the one before.
#[expect(unsafe_code, reason = "rustix has no signal masks")]
fn set_mask(mask: &SignalSet) -> SignalSet {
    let mut previous = SignalSet([0; 16]);
    // SAFETY: both are as large as the C library's, and live as long as the call. With these arguments it can't fail.
    unsafe { pthread_sigmask(SIG_SETMASK, mask, &mut previous) };
    previous
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel says of this thread's mask.
    fn blocked() -> u64 {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap()
    }

    /// All that can be are blocked, but faults aren't; afterwards it is as before, also within each other.
    #[test]
    fn blocks() {
        let before = blocked();
        {
            let _outer = Blocked::new();
            let during = blocked();
            // SIGHUP, SIGINT, SIGPROF, SIGTERM.
            assert!([1, 2, 27, 15].iter().all(|signal| during & (1 << (signal - 1)) != 0), "{during:x}");
            assert!(FAULTS.iter().all(|signal| during & (1 << (signal - 1)) == 0), "{during:x}");
            drop(Blocked::new());
            assert_eq!(blocked(), during);
        }
        assert_eq!(blocked(), before);
    }
}
