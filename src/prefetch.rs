//! Asking the processor for memory before it is needed.
//!
//! What another CPU has written or read last takes some tens of nanoseconds to come, several times as long as all else that
//! is done with a record. Asked for in time, it comes meanwhile. These are hints: where there are none, it is only slower.

#![cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "hints are functions of the processor"))]

/// Bytes of a cache line; where it isn't true, too much or too little is asked for.
const LINE: usize = 64;

/// Of so many elements that are read soon. There need be nothing at this address.
#[inline(always)]
pub(crate) fn for_reading<T>(soon: *const T, elements: usize) {
    for offset in (0..elements * size_of::<T>()).step_by(LINE) {
        let line = soon.wrapping_byte_add(offset);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a hint, which neither reads nor faults, whatever the address.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(line.cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = line;
    }
}

/// Of what is written soon. There need be nothing at this address.
#[inline]
pub(crate) fn for_writing<T>(element: *const T) {
    for offset in (0..size_of::<T>()).step_by(LINE) {
        let line = element.wrapping_byte_add(offset);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a hint, which neither reads nor faults, whatever the address.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_ET0>(line.cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = line;
    }
}
