//! What a filter's names mean on this host.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use rustix::net::{AddressFamily, SocketType, netdevice, socket};

use super::primitive::Primitive;
use crate::error::{Capability, Error, ErrorKind};
use crate::kernel::{lacks, near};

/// The inode of the initial pid namespace (`PROC_PID_INIT_INO`), always the same.
const INITIAL_PID_NAMESPACE: u64 = 0xEFFF_FFFC;
/// The inode of the initial cgroup namespace (`PROC_CGROUP_INIT_INO`).
const INITIAL_CGROUP_NAMESPACE: u64 = 0xEFFF_FFFB;
/// The inode, and so the id, of the cgroup2 hierarchy's root.
const ROOT_CGROUP: u64 = 1;

/// This host, as this process sees it.
pub(super) struct Host {
    proc: PathBuf,
    /// The inode of the cgroup namespace that shows paths from the hierarchy's root on.
    initial_cgroup_namespace: u64,
}

/// A cgroup as the kernel's programs know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cgroup {
    pub(super) id: u64,
    /// Below the root of the hierarchy, which has 0.
    pub(super) depth: u32,
}

impl Host {
    pub(super) fn new() -> Self {
        Self { proc: "/proc".into(), initial_cgroup_namespace: INITIAL_CGROUP_NAMESPACE }
    }

    /// The index of an interface in the network namespace of this process.
    ///
    /// # Errors
    ///
    /// [`NotFound`](ErrorKind::NotFound), with near names.
    pub(super) fn interface(&self, name: &str) -> Result<u32, Error> {
        let system = |error: rustix::io::Errno| Error::system("looking up an interface", error.raw_os_error());
        let any = socket(AddressFamily::UNIX, SocketType::DGRAM, None).map_err(system)?;
        match netdevice::name_to_index(&any, name) {
            Ok(index) => Ok(index),
            Err(rustix::io::Errno::NODEV) => {
                let list = fs::read_to_string(self.proc.join("self/net/dev")).unwrap_or_default();
                Err(not_found("interface", name, "", near(name, interfaces(&list))))
            }
            Err(error) => Err(system(error)),
        }
    }

    /// The inode of the network namespace that a file stands for.
    ///
    /// # Errors
    ///
    /// [`NotFound`](ErrorKind::NotFound) if there is no such file, or it is something else.
    pub(super) fn netns(&self, path: &Path) -> Result<u32, Error> {
        const WHAT: &str = "network namespace";
        let name = path.to_string_lossy();
        let link = fs::read_link(path);
        // That of a process that this one may not look at; Linux 5.10 shows a link without a target.
        let forbidden = match &link {
            Ok(target) => target.as_os_str().is_empty(),
            Err(error) => error.kind() == io::ErrorKind::PermissionDenied,
        };
        if forbidden && path.starts_with(&self.proc) && lacks(Capability::SysPtrace) {
            let action = format!("looking at the network namespace `{}`", name.escape_debug());
            return Err(Error::no_privilege(action, vec![Capability::SysPtrace]));
        }
        let file = fs::metadata(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                not_found(WHAT, &name, "", near_entries(path, |_| true))
            }
            _ => failed(format!("looking at the network namespace `{}`", name.escape_debug()), &error),
        })?;
        // All namespaces are in one file system, which has nothing else.
        let own = self.namespace("net")?;
        // Links below /proc say what they are.
        let target = link.unwrap_or_default();
        let other = target.to_string_lossy().split_once(":[").is_some_and(|(kind, _)| kind != "net");
        if file.dev() != own.dev() || other {
            let reason = if other { "it is a namespace of another kind" } else { "it is another file" };
            return Err(not_found(WHAT, &name, reason, Vec::new()));
        }
        u32::try_from(file.ino()).map_err(|_| not_found(WHAT, &name, "its number is too large", Vec::new()))
    }

    /// The inode of a process's network namespace.
    ///
    /// # Errors
    ///
    /// [`NotFound`](ErrorKind::NotFound) if there is no such process; [`NoPrivilege`](ErrorKind::NoPrivilege) if this one
    /// may not look at it.
    pub(super) fn netns_of_pid(&self, pid: u32) -> Result<u32, Error> {
        let process = self.proc.join(pid.to_string());
        if !process.exists() {
            return Err(not_found("process", &pid.to_string(), "", Vec::new()));
        }
        self.netns(&process.join("ns/net"))
    }

    /// That pids are numbers of the initial namespace here, as they are in the kernel's programs.
    ///
    /// # Errors
    ///
    /// [`HostNeeded`](ErrorKind::HostNeeded).
    pub(super) fn check_pids(&self, primitive: &Primitive) -> Result<(), Error> {
        check_pid_namespace(self.namespace("pid")?.ino(), primitive)
    }

    /// A cgroup, by its path in the file system or by that below the root of the hierarchy.
    ///
    /// # Errors
    ///
    /// [`NotFound`](ErrorKind::NotFound) if there is none, or no cgroup2 hierarchy is mounted;
    /// [`HostNeeded`](ErrorKind::HostNeeded) if it can't be told how deep it is.
    pub(super) fn cgroup(&self, path: &Path) -> Result<Cgroup, Error> {
        const WHAT: &str = "cgroup";
        let name = path.to_string_lossy();
        let mountinfo = self.proc.join("self/mountinfo");
        let text = fs::read(&mountinfo).map_err(|error| failed(format!("reading {}", mountinfo.display()), &error))?;
        let mounts = mounts(&text);
        let Some(mount) = mounts.iter().find(|mount| mount.root == Path::new("/")).or(mounts.first()) else {
            return Err(not_found(
                WHAT,
                &name,
                "no cgroup2 hierarchy is mounted where this process sees it",
                Vec::new(),
            ));
        };
        let below_root = mount.point.join(path.strip_prefix("/").unwrap_or(path));
        let as_file = if path.is_absolute() { found(path, &mounts) } else { None };
        // What is in the file system as well as below the root is taken for the former.
        if let Some((mount, directory)) = as_file.or_else(|| found(&below_root, &mounts)) {
            let initial = self.namespace("cgroup").is_ok_and(|file| file.ino() == self.initial_cgroup_namespace);
            return mount.cgroup(&directory, initial);
        }
        let reason = format!("the cgroup2 hierarchy is mounted at {}", mount.point.display());
        let is_cgroup = |path: &Path| found(path, &mounts).is_some();
        let mut near = near_entries(path, is_cgroup);
        if near.is_empty() {
            near = near_entries(&below_root, is_cgroup);
        }
        Err(not_found(WHAT, &name, &reason, near))
    }

    /// The file that stands for one of this process's own namespaces.
    fn namespace(&self, kind: &str) -> Result<fs::Metadata, Error> {
        let path = self.proc.join("self/ns").join(kind);
        fs::metadata(&path).map_err(|error| failed(format!("looking at {}", path.display()), &error))
    }
}

fn check_pid_namespace(inode: u64, primitive: &Primitive) -> Result<(), Error> {
    if inode == INITIAL_PID_NAMESPACE {
        return Ok(());
    }
    let reason = "the kernel knows host pids, and this process is in a pid namespace of its own: run it on the host, or in a \
                  container that shares the host's (`--pid=host`)";
    Err(ErrorKind::HostNeeded { filter: primitive.to_string(), reason }.into())
}

/// Where a cgroup2 hierarchy is mounted.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    device: u64,
    /// What of the hierarchy is mounted there, as this process's cgroup namespace shows it.
    root: PathBuf,
    point: PathBuf,
}

impl Mount {
    /// A directory below its point.
    fn cgroup(&self, directory: &Path, initial_namespace: bool) -> Result<Cgroup, Error> {
        let inode = |path: &Path| {
            let file = fs::metadata(path);
            file.map(|file| file.ino()).map_err(|error| failed(format!("looking at {}", path.display()), &error))
        };
        let depth = |path: &Path| path.components().filter(|part| matches!(part, Component::Normal(_))).count();
        let below = depth(directory.strip_prefix(&self.point).unwrap_or(directory));
        let is_root = inode(&self.point)? == ROOT_CGROUP;
        // A namespace shows its own root in place of the hierarchy's.
        if !is_root && !initial_namespace {
            let filter = Primitive::Cgroup(directory.to_owned()).to_string();
            let reason = "this process is in a cgroup namespace of its own, which doesn't tell how deep in the host's hierarchy \
                          that is: run it on the host, or in a container that shares the host's (`--cgroupns=host`)";
            return Err(ErrorKind::HostNeeded { filter, reason }.into());
        }
        let above = if is_root { 0 } else { depth(&self.root) };
        // On 64-bit machines, from Linux 5.5 on, the inode is the id.
        Ok(Cgroup { id: inode(directory)?, depth: (above + below) as u32 })
    }
}

/// The directory that a path leads to, and the mount that it is in.
fn found<'a>(path: &Path, mounts: &'a [Mount]) -> Option<(&'a Mount, PathBuf)> {
    let directory = fs::canonicalize(path).ok()?;
    let file = fs::metadata(&directory).ok().filter(fs::Metadata::is_dir)?;
    let fits = |mount: &&Mount| mount.device == file.dev() && directory.starts_with(&mount.point);
    let mount = mounts.iter().filter(fits).max_by_key(|mount| mount.point.as_os_str().len())?;
    Some((mount, directory))
}

/// The cgroup2 mounts of `/proc/PID/mountinfo`:
///
/// `38 31 0:41 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw`
fn mounts(mountinfo: &[u8]) -> Vec<Mount> {
    let mount = |line: &[u8]| {
        let line = std::str::from_utf8(line).ok()?;
        let (mount, source) = line.split_once(" - ")?;
        if source.split(' ').next() != Some("cgroup2") {
            return None;
        }
        let mut fields = mount.split(' ').skip(2);
        let (major, minor) = fields.next()?.split_once(':')?;
        let device = device(major.parse().ok()?, minor.parse().ok()?);
        Some(Mount { device, root: unescaped(fields.next()?), point: unescaped(fields.next()?) })
    };
    mountinfo.split(|byte| *byte == b'\n').filter_map(mount).collect()
}

/// A device's two numbers as `stat` puts them together.
fn device(major: u64, minor: u64) -> u64 {
    (major & 0xffff_f000) << 32 | (major & 0xfff) << 8 | (minor & 0xffff_ff00) << 12 | (minor & 0xff)
}

/// A path of mountinfo, where blanks and backslashes are octal: `\040`.
fn unescaped(text: &str) -> PathBuf {
    let mut parts = text.split('\\');
    let mut path = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let escaped = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match (escaped, part.get(3..)) {
            (Some(byte), Some(rest)) => {
                path.push(char::from(byte));
                path.push_str(rest);
            }
            _ => {
                path.push('\\');
                path.push_str(part);
            }
        }
    }
    path.into()
}

/// The interfaces of `/proc/net/dev`, below two lines of headings.
fn interfaces(list: &str) -> impl Iterator<Item = &str> {
    list.lines().skip(2).filter_map(|line| line.rsplit_once(':')).map(|(name, _)| name.trim_start())
}

/// What is where a path would have led, and has a near name.
fn near_entries(path: &Path, fits: impl Fn(&Path) -> bool) -> Vec<String> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Vec::new();
    };
    let entries = fs::read_dir(parent).into_iter().flatten().flatten().filter(|entry| fits(&entry.path()));
    let names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    let near = near(&name.to_string_lossy(), names.iter().map(String::as_str));
    near.into_iter().map(|name| parent.join(name).to_string_lossy().into_owned()).collect()
}

fn not_found(what: &'static str, name: &str, reason: &str, near: Vec<String>) -> Error {
    ErrorKind::NotFound { what, name: name.to_owned(), reason: reason.to_owned(), near }.into()
}

fn failed(action: String, error: &io::Error) -> Error {
    let errno = error.raw_os_error().unwrap_or_default();
    Error::system(action, errno).with_errno(errno)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A directory that goes with the test.
    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("dwell-filter-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(fs::canonicalize(path).unwrap())
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    /// A misspelt interface is met with the right one.
    #[test]
    fn interfaces_by_name() {
        let host = Host::new();
        assert_eq!(host.interface("lo").unwrap(), 1);
        let error = host.interface("l0").unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::NotFound { what: "interface", name, .. } if name == "l0"), "{error}");
        let list = "Inter-|   Receive\n face |bytes\n    lo:  1 2\n  eth0: 3\nveth0@a:b: 4\n";
        assert_eq!(interfaces(list).collect::<Vec<_>>(), ["lo", "eth0", "veth0@a:b"]);
        assert_eq!(near("eht0", interfaces(list)), ["eth0"]);
    }

    /// The inode that /proc shows; other files and other namespaces aren't taken for one.
    #[test]
    fn network_namespaces() {
        let host = Host::new();
        let link = fs::read_link("/proc/self/ns/net").unwrap();
        let inode = host.netns(Path::new("/proc/self/ns/net")).unwrap();
        assert_eq!(link.to_str().unwrap(), format!("net:[{inode}]"));
        assert_eq!(host.netns_of_pid(std::process::id()).unwrap(), inode);
        let error = |path: &str| host.netns(Path::new(path)).unwrap_err().to_string();
        assert_eq!(
            error("/proc/self/ns/uts"),
            "there is no network namespace `/proc/self/ns/uts` here: it is a namespace of another kind"
        );
        assert_eq!(error("/dev/null"), "there is no network namespace `/dev/null` here: it is another file");
        assert_eq!(error("/dev/null/a"), "there is no network namespace `/dev/null/a` here");
        let none = host.netns_of_pid(u32::MAX).unwrap_err().to_string();
        assert_eq!(none, "there is no process `4294967295` here");

        let directory = Directory::new("netns");
        symlink("/proc/self/ns/net", directory.0.join("blue")).unwrap();
        assert_eq!(host.netns(&directory.0.join("blue")).unwrap(), inode);
        let near = host.netns(&directory.0.join("bleu")).unwrap_err();
        let ErrorKind::NotFound { near, .. } = near.kind() else { panic!("{near}") };
        assert_eq!(*near, [directory.0.join("blue").to_string_lossy()]);
    }

    /// Pids are taken in the initial namespace only.
    #[test]
    fn pid_namespaces() {
        assert!(check_pid_namespace(INITIAL_PID_NAMESPACE, &Primitive::Pid(7)).is_ok());
        let error = check_pid_namespace(4_026_532_500, &Primitive::Tid(7)).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::HostNeeded { filter, .. } if filter == "tid 7"), "{error}");
        let here = fs::metadata("/proc/self/ns/pid").unwrap().ino() == INITIAL_PID_NAMESPACE;
        assert_eq!(Host::new().check_pids(&Primitive::Pid(7)).is_ok(), here);
    }

    /// A /proc that shows a directory as the place of the cgroup2 hierarchy.
    fn host_with(directory: &Directory, root: &str, initial_namespace: bool) -> Host {
        let proc = directory.0.join("proc");
        fs::create_dir_all(proc.join("self/ns")).unwrap();
        let number = fs::metadata(&directory.0).unwrap().dev();
        let minor = (0..1 << 20).find(|minor| device(number >> 8 & 0xfff, *minor) == number).unwrap();
        let major = number >> 8 & 0xfff;
        let point = directory.0.join("mount").to_string_lossy().replace(' ', "\\040");
        let mountinfo = format!(
            "22 1 0:21 / /proc rw - proc proc rw\n38 31 {major}:{minor} {root} {point} rw a:1 - cgroup2 x rw\n"
        );
        fs::write(proc.join("self/mountinfo"), mountinfo).unwrap();
        let namespace = proc.join("self/ns/cgroup");
        fs::write(&namespace, "").unwrap();
        let own = fs::metadata(namespace).unwrap().ino();
        let initial_cgroup_namespace = if initial_namespace { own } else { INITIAL_CGROUP_NAMESPACE };
        Host { proc, initial_cgroup_namespace }
    }

    /// By a path in the file system or below the root, the id and the depth are the same; links and dots don't matter.
    #[test]
    fn cgroups() {
        let directory = Directory::new("cgroup a");
        let mount = directory.0.join("mount");
        fs::create_dir_all(mount.join("user.slice/one")).unwrap();
        fs::write(mount.join("user.slice/cgroup.procs"), "").unwrap();
        symlink(mount.join("user.slice"), directory.0.join("link")).unwrap();
        let host = host_with(&directory, "/", true);
        let id = |path: &str| fs::metadata(mount.join(path)).unwrap().ino();
        let one = Cgroup { id: id("user.slice/one"), depth: 2 };
        for path in ["/user.slice/one", "user.slice/one", "user.slice/one/", "/user.slice/../user.slice/./one"] {
            assert_eq!(host.cgroup(Path::new(path)).unwrap(), one, "{path}");
        }
        assert_eq!(host.cgroup(&mount.join("user.slice/one")).unwrap(), one);
        assert_eq!(host.cgroup(&directory.0.join("link/one")).unwrap(), one);
        assert_eq!(host.cgroup(Path::new("/")).unwrap(), Cgroup { id: id(""), depth: 0 });
        assert_eq!(host.cgroup(&mount).unwrap(), Cgroup { id: id(""), depth: 0 });

        let not_found = |path: &Path| {
            let error = host.cgroup(path).unwrap_err();
            let ErrorKind::NotFound { what: "cgroup", near, .. } = error.kind() else { panic!("{error}") };
            assert!(error.to_string().contains("the cgroup2 hierarchy is mounted at"), "{error}");
            near.clone()
        };
        let slice = mount.join("user.slice").to_string_lossy().into_owned();
        assert_eq!(not_found(Path::new("/usr.slice")), std::slice::from_ref(&slice));
        assert_eq!(not_found(&mount.join("user.slic")), [slice]);
        // Neither a file nor what is outside is one.
        assert_eq!(not_found(Path::new("/user.slice/cgroup.procs")), [""; 0]);
        assert_eq!(not_found(Path::new("../proc")), [""; 0]);
        assert_eq!(not_found(Path::new("/dev/null")), [""; 0]);
    }

    /// What is mounted may be a part of the hierarchy; in a namespace it isn't told which.
    #[test]
    fn parts_of_the_hierarchy() {
        let directory = Directory::new("part");
        fs::create_dir_all(directory.0.join("mount/one")).unwrap();
        let host = host_with(&directory, "/docker/abc", true);
        assert_eq!(host.cgroup(Path::new("/one")).unwrap().depth, 3);
        for root in ["/", "/../.."] {
            let host = host_with(&directory, root, false);
            let error = host.cgroup(Path::new("/one")).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::HostNeeded { .. }), "{error}");
        }
        fs::write(directory.0.join("proc/self/mountinfo"), "22 1 0:21 / /proc rw - proc proc rw\n").unwrap();
        let error = host.cgroup(Path::new("/one")).unwrap_err().to_string();
        assert!(error.ends_with("no cgroup2 hierarchy is mounted where this process sees it"), "{error}");
    }

    /// On the machine that runs the test: the root has a fixed number, where it is mounted.
    #[test]
    fn root_of_this_host() {
        let mounts = mounts(&fs::read("/proc/self/mountinfo").unwrap());
        let inode = |mount: &Mount| fs::metadata(&mount.point).map_or(0, |root| root.ino());
        let found = Host::new().cgroup(Path::new("/"));
        match mounts.iter().find(|mount| mount.root == Path::new("/")) {
            Some(mount) if inode(mount) == ROOT_CGROUP => {
                assert_eq!(found.unwrap(), Cgroup { id: ROOT_CGROUP, depth: 0 });
            }
            // Not mounted, or only a part of it.
            _ => assert!(found.is_err() || found.unwrap().id > ROOT_CGROUP),
        }
    }

    /// What mountinfo escapes, and other file systems.
    #[test]
    fn mountinfo() {
        let text = b"31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
                     36 31 0:36 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n\
                     41 31 0:41 / /sys/fs/cgroup/a\\040b\\134\\011 rw,relatime shared:9 master:1 - cgroup2 cgroup2 rw\n\
                     junk\n\n";
        let [mount] = &mounts(text)[..] else { panic!() };
        assert_eq!(*mount, Mount { device: 41, root: "/".into(), point: "/sys/fs/cgroup/a b\\\t".into() });
        assert_eq!(device(8, 1), 0x801);
        let null = fs::metadata("/dev/null").unwrap();
        assert_eq!(device(1, 3), null.rdev());
    }
}
