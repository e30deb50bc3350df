//! What a probe of this process has in the kernel, by what the kernel says of its maps and programs.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::{fs, io};

use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use libbpf_rs::{MapCore as _, MapHandle, MapType};
use serde::{Deserialize, Serialize};

/// A map or the programs of the process; bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Item {
    pub name: String,
    pub bytes: u64,
    /// How much of that there is for each possible CPU.
    pub per_cpu: u64,
}

/// Maps that are used by programs of which this process has descriptors, and those programs.
pub fn items() -> Result<Vec<Item>, Box<dyn Error>> {
    let descriptors = descriptors()?;
    let ids = |name| descriptors.iter().filter_map(move |info| info.get(name)).map(|id| id.parse::<u32>());
    let programs: BTreeSet<u32> = ids("prog_id").collect::<Result<_, _>>()?;
    let mut maps: BTreeSet<u32> = ids("map_id").collect::<Result<_, _>>()?;
    let memory =
        |info: &BTreeMap<String, String>| info.get("memlock").and_then(|bytes| bytes.parse().ok()).unwrap_or(0);
    // A page or more for each, and the code that was made of it.
    let mut program_bytes: u64 = descriptors.iter().filter(|info| info.contains_key("prog_id")).map(memory).sum();
    let options = ProgInfoQueryOptions::default().include_map_ids(true).include_jited_prog_insns(true);
    for program in ProgInfoIter::with_query_opts(options).filter(|program| programs.contains(&program.id)) {
        program_bytes += program.jited_prog_insns.len() as u64;
        maps.extend(program.map_ids);
    }
    let mut items = maps.into_iter().map(map).collect::<Result<Vec<_>, _>>()?;
    items.push(Item { name: format!("{} programs", programs.len()), bytes: program_bytes, per_cpu: 0 });
    Ok(items)
}

fn map(id: u32) -> Result<Item, Box<dyn Error>> {
    let map = MapHandle::from_map_id(id)?;
    let info = fdinfo(&map.as_fd().as_raw_fd().to_string())?;
    let bytes: u64 = info.get("memlock").ok_or("a map without its size")?.parse()?;
    let name = map.name().to_string_lossy().into_owned();
    let cpus = possible_cpus()? as u64;
    let per_cpu = match map.map_type() {
        MapType::PercpuArray | MapType::PercpuHash => bytes / cpus,
        // The rings have an element for each CPU, too, but share what was asked for.
        _ => 0,
    };
    Ok(Item { name, bytes, per_cpu })
}

/// What the kernel says of each open descriptor.
fn descriptors() -> io::Result<Vec<BTreeMap<String, String>>> {
    let names = fs::read_dir("/proc/self/fdinfo")?.map(|entry| Ok(entry?.file_name()));
    let names = names.collect::<io::Result<Vec<_>>>()?;
    // The directory's own is closed by now.
    Ok(names.iter().filter_map(|name| fdinfo(&name.to_string_lossy()).ok()).collect())
}

fn fdinfo(descriptor: &str) -> io::Result<BTreeMap<String, String>> {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{descriptor}"))?;
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    Ok(lines.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect())
}

/// The CPUs that there can ever be.
pub fn possible_cpus() -> io::Result<usize> {
    let text = fs::read_to_string("/sys/devices/system/cpu/possible")?;
    let last = text.trim().rsplit([',', '-']).next().and_then(|last| last.parse::<usize>().ok());
    last.map(|last| last + 1).ok_or_else(|| io::ErrorKind::InvalidData.into())
}
