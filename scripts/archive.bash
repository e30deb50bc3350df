# shellcheck shell=bash
# Debian's archive, for scripts that want packages of it without installing them: a private state of apt, so that neither
# root nor changes to the machine's own are needed. What is downloaded is verified by Debian's keyring.
#
# Whoever reads this file in has set `here` to the directory of it, and has a function `die`.
# Environment: DWELL_APT_MIRROR, see scripts/vm.

need() {
  local t missing=()
  for t; do command -v "$t" >/dev/null || missing+=("$t"); done
  [[ ${#missing[@]} -eq 0 ]] || die "missing: ${missing[*]} (\`scripts/setup guest\` installs them)"
}

# URLs below which Debian's archive may be, best first.
mirrors() {
  if [[ -n ${DWELL_APT_MIRROR:-} ]]; then
    sed 's,/*$,,; s,/debian$,,' <<<"$DWELL_APT_MIRROR"
    return
  fi
  local sites
  # shellcheck disable=SC2016 # apt's own variable
  sites=$(apt-get indextargets --format '$(SITE)' | sed 's,/*$,,' | sort -u)
  sed -n 's,/debian$,,p' <<<"$sites"
  # Other distributions: what apt's own templates say, or a mirror that carries both.
  sed -n 's,^BaseURI: \(.*\)/debian/*$,\1,p' /usr/share/python-apt/templates/Debian.info 2>/dev/null | head -n 1
  sed -n 's,/ubuntu$,,p' <<<"$sites"
}

# archive_open DIR ARCHITECTURE PREFIX DISTRIBUTION:SUITE...: lists what the suites have, with apt's state in DIR. A mirror
# is taken for good if there is a package whose name begins with PREFIX. Sets apt_options, for apt-get and apt-cache.
apt_options=()
archive_open() {
  [[ ${#apt_options[@]} -eq 0 ]] || return 0
  need apt-get apt-cache dpkg-deb
  local dir=$1 arch=$2 prefix=$3 mirror suite
  shift 3
  mkdir -p "$dir/lists/partial" "$dir/archives/partial"
  : >"$dir/status"
  # shellcheck disable=SC2154 # by whoever reads this in
  cp -f "$here/debian-keyring.gpg" "$dir/keyring.gpg"
  apt_options=(-o Dir::Etc::sourcelist="$dir/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o Dir::State::lists="$dir/lists" -o Dir::State::status="$dir/status" -o Dir::Cache="$dir"
    -o APT::Architecture="$arch" -o APT::Architectures::="$arch" -o APT::Sandbox::User=root
    -o Acquire::Languages=none -o Acquire::Retries=3
    -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false
    -o Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false)
  : >"$dir/log"
  for mirror in $(mirrors); do
    for suite; do
      echo "deb [arch=$arch signed-by=$dir/keyring.gpg] $mirror/${suite%%:*} ${suite#*:} main"
    done >"$dir/sources.list"
    # Suites leave the mirrors with time, which is an error to apt; the others are fine then.
    apt-get "${apt_options[@]}" -qq update >>"$dir/log" 2>&1 || true
    [[ -z $(apt-cache "${apt_options[@]}" pkgnames "$prefix") ]] || return 0
  done
  tail -n 5 "$dir/log" >&2
  die "found no Debian archive; set DWELL_APT_MIRROR to the URL below which debian/ and debian-security/ are"
}

# One "package version" a line on stdin; the newest whose version begins with $1.
newest() { awk -v s="$1" 'index($2, s) == 1' | sort -k2,2V | tail -n 1; }

# download_all DIR PACKAGE...: them and all that they depend on, since the private state has nothing installed.
download_all() {
  local dir=$1
  shift
  mkdir -p "$dir/partial"
  apt-get "${apt_options[@]}" -qq -y -o Dir::Cache::archives="$dir" --download-only --no-install-recommends install "$@" >&2
}

# Unpacks the packages in directory $1 into $2, whose links to directories stay links.
unpack() {
  local deb
  mkdir -p "$2"
  for deb in "$1"/*.deb; do dpkg-deb --fsys-tarfile "$deb" | tar -x --keep-directory-symlink -C "$2"; done
}
