-- Whether a publication includes updates or deletes, which need a replica identity.
select publication.pubupdate or publication.pubdelete as needs_identity
from pg_publication as publication
where publication.pubname = %(publication)s;
