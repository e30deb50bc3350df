//! The kernel's types that the programs read, where libbpf can open them.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;

use rustix::fs::{MemfdFlags, memfd_create};

/// BTF in a file that has no name.
#[derive(Debug)]
pub(super) struct CoreTypes(File);

impl CoreTypes {
    /// `None`: there can't be such a file, or libbpf couldn't open it. It does without, and takes longer.
    pub(super) fn new(btf: &[u8]) -> Option<Self> {
        let mut file = File::from(memfd_create("dwell-types", MemfdFlags::CLOEXEC).ok()?);
        file.write_all(btf).ok()?;
        let types = Self(file);
        // Without /proc there is no way to it.
        types.path().exists().then_some(types)
    }

    pub(super) fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}
