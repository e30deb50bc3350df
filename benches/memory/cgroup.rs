//! A cgroup whose memory has a limit.

use std::path::{Path, PathBuf};
use std::{fs, io, process};

/// Where the hierarchy of version 2 mostly is.
const ROOT: &str = "/sys/fs/cgroup";

/// Taken away again when it is dropped, by when no process may be in it any more.
pub struct Cgroup(PathBuf);

impl Cgroup {
    /// With this limit in bytes. The error says why there can't be one.
    pub fn new(limit: u64) -> Result<Self, String> {
        let root = Path::new(ROOT);
        let controllers = fs::read_to_string(root.join("cgroup.controllers"))
            .map_err(|error| format!("no cgroup v2 at {ROOT}: {error}"))?;
        if !controllers.split_whitespace().any(|name| name == "memory") {
            return Err(format!("the cgroup v2 at {ROOT} doesn't control memory"));
        }
        let failed = |what| move |error: io::Error| format!("{what}: {error}");
        fs::write(root.join("cgroup.subtree_control"), "+memory").map_err(failed("delegating memory to a cgroup"))?;
        let path = root.join(format!("dwell-memory-{}", process::id()));
        fs::create_dir(&path).map_err(failed("making a cgroup"))?;
        let cgroup = Self(path);
        cgroup.set("memory.max", limit).map_err(failed("limiting a cgroup"))?;
        // Where there is no swap, there is no such file.
        let _ = cgroup.set("memory.swap.max", 0);
        Ok(cgroup)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    fn set(&self, file: &str, value: u64) -> io::Result<()> {
        fs::write(self.0.join(file), value.to_string())
    }

    /// The most it ever held, in bytes; from Linux 5.19 on.
    pub fn peak(&self) -> Option<u64> {
        fs::read_to_string(self.0.join("memory.peak")).ok()?.trim().parse().ok()
    }

    /// How often it was at its limit, and how many of its processes were killed for that.
    pub fn events(&self) -> io::Result<(u64, u64)> {
        let text = fs::read_to_string(self.0.join("memory.events"))?;
        let count = |name: &str| {
            let number = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
            number.unwrap_or(0)
        };
        Ok((count("max "), count("oom_kill ")))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}
