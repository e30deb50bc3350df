//! Test runs: the kernel runs a program many times in a row, without anything being attached.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::time::Duration;

use libbpf_rs::libbpf_sys;
use rustix::time::{ClockId, clock_gettime};

/// The CPU time that the calling thread has taken, in the kernel, too.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Runs a program for packets this often, and says how much CPU time that took. Unlike the kernel's own figure it
/// doesn't have what other threads took meanwhile in it.
#[expect(unsafe_code, reason = "libbpf-rs' programs can't be shared between threads, and their descriptors can")]
pub fn test_run(program: BorrowedFd<'_>, repeat: u32) -> io::Result<Duration> {
    let packet = [0_u8; 64];
    let mut options = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
        data_in: packet.as_ptr().cast(),
        data_size_in: packet.len() as u32,
        repeat: repeat as i32,
        ..Default::default()
    };
    let begin = cpu_time();
    // SAFETY: `options` says its own size, and outlives the call, as does the packet, of which it has the true length. All
    // that the kernel would write to is NULL.
    let result = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &raw mut options) };
    let taken = cpu_time() - begin;
    if result == 0 { Ok(taken) } else { Err(io::Error::from_raw_os_error(-result)) }
}
