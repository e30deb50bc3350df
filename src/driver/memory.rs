//! What maps and programs take of the kernel's memory, as it says itself.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{AsFd, AsRawFd as _};

use libbpf_rs::{MapCore as _, Object};

use super::span::AttachedSpan;

/// The bytes of maps, by their ids: spans share some, and so do the objects of a span.
pub(super) type MapBytes = BTreeMap<u32, u64>;

/// Adds the maps of a loaded object. Most aren't held any longer than the object is, so it is asked here.
pub(super) fn add_maps(bytes: &mut MapBytes, object: &Object) {
    for map in object.maps() {
        if let Ok(info) = map.info() {
            bytes.entry(info.info.id).or_insert_with(|| bytes_of(&map));
        }
    }
}

/// What maps and programs of these spans take together.
pub(crate) fn kernel_memory<'a>(spans: impl Iterator<Item = &'a AttachedSpan>) -> (u64, u64) {
    let (mut maps, mut programs) = (MapBytes::new(), 0);
    for span in spans {
        maps.extend(span.map_bytes());
        programs += span.program_bytes();
    }
    (maps.values().sum(), programs)
}

/// What a map or a program takes; 0 where `/proc` doesn't tell.
pub(super) fn bytes_of(object: &impl AsFd) -> u64 {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", object.as_fd().as_raw_fd()));
    parse(&text.unwrap_or_default()).unwrap_or_default()
}

/// `memlock:\t4096`, which has been there before and after it meant locked memory.
fn parse(fdinfo: &str) -> Option<u64> {
    let line = fdinfo.lines().find_map(|line| line.strip_prefix("memlock:"))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It is one of several lines.
    #[test]
    fn parses() {
        let text = "pos:\t0\nflags:\t02000002\nmap_type:\t2\nmemlock:\t282624\nmap_id:\t7\n";
        assert_eq!(parse(text), Some(282_624));
        assert_eq!(parse("pos:\t0\n"), None);
    }
}
