//! The programs of `streaming.bpf.c`, and the maps of a probe of this process.

use std::collections::BTreeSet;
use std::error::Error;
use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use libbpf_rs::btf::Btf;
use libbpf_rs::btf::types::{DataSec, Var};
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle, Object, ObjectBuilder, OpenObject};

use crate::test_run::test_run;

/// Records that a program writes in each run: `RECORDS` in `streaming.bpf.c`.
const RECORDS: u32 = 8;
/// `struct dwell_ring_head`, and a slot with a record of a span between hooks.
const RING_HEAD: u32 = 128;
const STRIDE: u32 = 8 + 136;

/// What writes records.
pub struct Writer {
    program: OwnedFd,
    /// Keeps the maps.
    object: Object,
}

impl Writer {
    /// Writes to the kernel's ring buffer.
    pub fn to_ring_buffer(object: &Path) -> Result<Self, Box<dyn Error>> {
        Self::new(open(object, "to_ring_buffer")?, "to_ring_buffer")
    }

    /// Writes to the rings of the probe that runs in this process.
    pub fn to_probe(object: &Path) -> Result<Self, Box<dyn Error>> {
        let rings = own_map("dwell_rings")?;
        let slots = (rings.value_size() - RING_HEAD) / STRIDE;
        if rings.value_size() != RING_HEAD + slots * STRIDE || !slots.is_power_of_two() {
            return Err("the rings aren't laid out as this benchmark thinks".into());
        }
        let mut open = open(object, "to_cpu_rings")?;
        set(&mut open, object, &[("ring_mask", slots - 1), ("ring_stride", STRIDE)])?;
        for mut map in open.maps_mut() {
            let own = match &*map.name().to_string_lossy() {
                name @ ("dwell_rings" | "dwell_ring" | ".data.wake") => own_map(name)?,
                _ => continue,
            };
            map.reuse_fd(own.as_fd())?;
        }
        Self::new(open, "to_cpu_rings")
    }

    fn new(open: OpenObject, name: &str) -> Result<Self, Box<dyn Error>> {
        let object = open.load().map_err(|error| format!("loading {name}: {error:#}"))?;
        Ok(Self { program: program(&object, name)?, object })
    }

    /// Writes so many records, a multiple of [`RECORDS`].
    pub fn write(&self, records: u32) -> Result<(), Box<dyn Error>> {
        test_run(self.program.as_fd(), records / RECORDS)?;
        Ok(())
    }

    /// The kernel's ring buffer.
    pub fn ring_buffer(&self) -> Result<MapHandle, Box<dyn Error>> {
        let map = self.object.maps().find(|map| map.name() == "plain_ring").ok_or("no ring buffer")?;
        Ok(MapHandle::try_from(&map)?)
    }

    /// Whether a record found no room. That is all that the programs have in `.bss`, if they run.
    pub fn dropped(&self) -> Result<bool, Box<dyn Error>> {
        let bss = self.object.maps().find(|map| map.name().to_string_lossy().ends_with(".bss")).ok_or("no .bss")?;
        let bytes = bss.lookup(&[0; 4], MapFlags::ANY)?.unwrap_or_default();
        Ok(bytes.iter().any(|byte| *byte != 0))
    }
}

/// The object, of which only this program will be loaded: others may need other maps.
pub fn open(object: &Path, name: &str) -> Result<OpenObject, Box<dyn Error>> {
    let mut open = ObjectBuilder::default().open_file(object)?;
    open.progs_mut().for_each(|mut program| program.set_autoload(program.name() == name));
    Ok(open)
}

/// A loaded program of the object.
pub fn program(object: &Object, name: &str) -> Result<OwnedFd, Box<dyn Error>> {
    let program = object.progs().find(|program| program.name() == name).ok_or_else(|| format!("no program {name}"))?;
    Ok(program.as_fd().try_clone_to_owned()?)
}

/// Sets constants of the programs.
fn set(open: &mut OpenObject, object: &Path, values: &[(&str, u32)]) -> Result<(), Box<dyn Error>> {
    let btf = Btf::from_path(object)?;
    let section = btf.type_by_name::<DataSec<'_>>(".rodata").ok_or("the object has no constants")?;
    for &(name, value) in values {
        let is_it = |ty| btf.type_by_id::<Var<'_>>(ty).is_some_and(|var| var.name().is_some_and(|other| other == name));
        let at = section.iter().find(|var| is_it(var.ty)).ok_or_else(|| format!("no constant {name}"))?.offset as usize;
        let mut rodata = open.maps_mut().find(|map| map.name().to_string_lossy().ends_with(".rodata"));
        let bytes = rodata.as_mut().and_then(|map| map.initial_value_mut()).ok_or("no .rodata")?;
        bytes.get_mut(at..at + 4).ok_or("a constant beyond .rodata")?.copy_from_slice(&value.to_ne_bytes());
    }
    Ok(())
}

/// A map of the programs that this process has open.
fn own_map(name: &str) -> Result<MapHandle, Box<dyn Error>> {
    let mut programs = BTreeSet::new();
    for entry in fs::read_dir("/proc/self/fdinfo")? {
        let Ok(info) = fs::read_to_string(entry?.path()) else { continue };
        let id = info.lines().find_map(|line| line.strip_prefix("prog_id:")?.trim().parse::<u32>().ok());
        programs.extend(id);
    }
    let all = ProgInfoIter::with_query_opts(ProgInfoQueryOptions::default().include_map_ids(true));
    let ids: BTreeSet<_> = all.filter(|program| programs.contains(&program.id)).flat_map(|own| own.map_ids).collect();
    let maps = ids.into_iter().filter_map(|id| MapHandle::from_map_id(id).ok());
    let map = maps.into_iter().find(|map| map.name() == name);
    map.ok_or_else(|| format!("the probe has no map {name}: are there no rings for each CPU on this kernel?").into())
}
