//! The programs of `benches/bpf`: from an object file that is loaded as it is.

use std::path::Path;

use libbpf_rs::{Link, ObjectBuilder};

/// Loads these programs of the object, and no others, and attaches them where their sections say. They stay as long as
/// the links.
pub fn attach(object: &Path, programs: &[&str]) -> Result<Vec<Link>, libbpf_rs::Error> {
    let mut open = ObjectBuilder::default().open_file(object)?;
    for mut program in open.progs_mut() {
        let wanted = programs.iter().any(|name| program.name() == *name);
        program.set_autoload(wanted);
    }
    let loaded = open.load()?;
    let wanted = loaded.progs_mut().filter(|program| programs.iter().any(|name| program.name() == *name));
    wanted.map(|program| program.attach()).collect()
}
